"""`bf16-8bit` in the Trainer: checkpoints that other precisions load."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn

from tests.contract.contract_models import Batches, trainer_with
from tests.masters.master_loops import equal
from tests.precision.weights_left import as_trained

WIDTH = 64  # squared: the smallest weight whose moments get 8 bits
pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
]


class Net(L.LightningModule):
    """Two Linears with coded moments; their biases and the norm keep float32 moments."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.losses = []

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx=0):
        loss = F.mse_loss(self(batch).float(), batch.float().flip(-1))
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def batches():
    generator = torch.Generator().manual_seed(7)
    return Batches(*[torch.randn(32, WIDTH, generator=generator) for _ in range(3)])


def fit(model, precision, steps=3, *, ckpt_path=None, **options):
    """Epochs of 3 steps; the end of an epoch is where Lightning resumes with the next batch."""
    end = {"max_epochs": steps // 3} if steps % 3 == 0 else {"max_steps": steps, "max_epochs": -1}
    trainer = trainer_with(precision if precision == "32-true" else as_trained(precision), **end, **options)
    trainer.fit(model, batches(), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("other", ["bf16-sr", "msamp-o2"])
def test_checkpoints_cross_to_other_precisions_and_back(other, tmp_path):
    first = Net()
    fit(first, "bf16-8bit", steps=3).save_checkpoint(tmp_path / "first.ckpt")
    second = Net(1)
    trainer = fit(second, other, steps=4, ckpt_path=tmp_path / "first.ckpt")
    state = trainer.optimizers[0].state[second.layers[0].weight]
    assert int(state["step"]) == 4
    scales = {"exp_avg_scale", "exp_avg_sq_scale"} if other == "msamp-o2" else set()
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq", *scales}
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    back = Net(2)
    trainer = fit(back, "bf16-8bit", steps=5, ckpt_path=tmp_path / "other.ckpt")
    assert "exp_avg_codes" in trainer.optimizers[0].state[back.layers[0].weight]
    assert len({tuple(loss.item() for loss in losses) for losses in (first.losses, second.losses, back.losses)}) == 3
    assert max(second.losses[0], back.losses[0]) < first.losses[0], "they go on, and do not begin anew"


def test_the_masters_are_exact_in_other_precisions(tmp_path):
    trainer = fit(Net(), "bf16-8bit", steps=3)
    exact = [value.detach().clone() for value in trainer.precision_plugin.main_params(trainer.optimizers[0])]
    trainer.save_checkpoint(tmp_path / "first.ckpt")

    class Looks(Callback):
        def on_train_start(self, trainer, model):
            self.found = [
                value.detach().clone() for value in trainer.precision_plugin.main_params(trainer.optimizers[0])
            ]

    for other in ("bf16-remainder", "bf16-master"):
        looks = Looks()
        fit(Net(1), other, steps=4, ckpt_path=tmp_path / "first.ckpt", callbacks=[looks])
        assert equal(looks.found, exact)


class Momentum(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


@pytest.mark.parametrize(("model", "message"), [(Net, "exp_avg"), (Momentum, "size of tensor a .0. must match")])
def test_lightnings_own_precision_does_not_go_on_from_codes(model, message, tmp_path):
    fit(model(), "bf16-8bit", steps=3).save_checkpoint(tmp_path / "first.ckpt")
    with pytest.raises((KeyError, RuntimeError), match=message):
        fit(model(), "32-true", steps=4, ckpt_path=tmp_path / "first.ckpt")
    trainer = fit(model(), "half-auto", steps=4, ckpt_path=tmp_path / "first.ckpt")  # decoded
    assert all(
        value.dtype == torch.float32 for entry in trainer.optimizers[0].state.values() for value in entry.values()
    )
    trainer = fit(model(), "bf16-8bit", steps=4, ckpt_path=tmp_path / "first.ckpt")
    assert all(value.numel() for entry in trainer.optimizers[0].state.values() for value in entry.values())
