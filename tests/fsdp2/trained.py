"""What the tests of ``strategy="fsdp2"`` train in the Trainer: a module around the small net, its data, its Trainer."""

import lightning as L
import torch

import lightning_lowprec  # noqa: F401  # the names
from tests.fsdp2.gathers import count_gathers
from tests.fsdp2.models import Net, batch, loss_of
from tests.toys import QUIET


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return batch(index // 4, 9)[index % 4]


class Module(L.LightningModule):
    """The net as a submodule; the loss goes around `forward`."""

    def __init__(self, early_optimizer=False):
        super().__init__()
        self.net = Net()
        self.losses, self.evaluated, self.gathers = [], [], {}
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2) if early_optimizer else None

    def on_train_start(self):
        self.gathers = count_gathers(self)

    def training_step(self, tokens, _):
        loss = loss_of(self.net, tokens)
        self.losses.append(loss.item())
        return {"loss": loss, "tokens": tokens}

    def validation_step(self, tokens, _):
        self.evaluated.append(loss_of(self.net, tokens).item())

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return self.optimizer or torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer_for(precision, strategy="fsdp2", **kwargs):
    return L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, precision=precision, **{**QUIET, "max_epochs": 1, **kwargs}
    )


def loader(steps=8):
    """``steps`` batches of two for each of two ranks."""
    return torch.utils.data.DataLoader(torch.utils.data.Subset(Tokens(), range(4 * steps)), batch_size=2)
