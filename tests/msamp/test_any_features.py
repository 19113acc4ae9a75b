"""Features that are no multiples of 16, as in MS-AMP's own example: zeros are appended inside of the products."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_lowprec import MSAMP
from lightning_lowprec.msamp import values_of
from tests.fsdp2.ranks import launch
from tests.fsdp2.toy import QUIET

LEVELS = ("O1", "O2", "O3")
K, N = 84, 10


def step(net, x, level, **options):
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=MSAMP(level, **options))
    module, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    x = x.clone().requires_grad_()
    output = module(x)[..., :N]
    fabric.backward(output.float().square().sum())
    optimizer.step()
    return output.detach(), x.grad[..., :K], values_of(net.weight)[:N, :K], net.bias[:N].detach()


@pytest.mark.parametrize("options", [{}, {"grad_accumulation_dtype": torch.float32}, {"emulate": "hopper"}], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_is_that_of_a_wider_layer_with_zeros(level, options):
    torch.manual_seed(0)
    narrow, wide = nn.Linear(K, N), nn.Linear(96, 16)
    with torch.no_grad():
        wide.weight.copy_(F.pad(narrow.weight, (0, 12, 0, 6)))
        wide.bias.copy_(F.pad(narrow.bias, (0, 6)))
    x = torch.randn(3, 7, K, generator=torch.Generator().manual_seed(1))
    found, expected = step(narrow, x, level, **options), step(wide, F.pad(x, (0, 12)), level, **options)
    assert all(map(torch.equal, found, expected))


class Example(L.LightningModule):
    """The classifier of MS-AMP's example."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        layers = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
        self.net = nn.Sequential(*layers)
        self.losses = []

    def training_step(self, batch, _):
        loss = F.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(plugin=None, devices=1):
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 10, (64,), generator=generator)
    x = torch.randn(10, 400, generator=generator)[y] + 0.1 * torch.randn(64, 400, generator=generator)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64 // devices)
    model = Example()
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_epochs=12,
        enable_checkpointing=False, plugins=plugin, **QUIET,
    )  # fmt: skip
    trainer.fit(model, data)
    return model.losses


@pytest.mark.parametrize("level", LEVELS)
def test_ms_amps_own_example_learns(level):
    plugin = MSAMP(level)
    losses = fit(plugin)
    assert plugin.plan.converted == ("net.0", "net.2", "net.4")
    assert losses[-1] < 0.5 * losses[0]
    assert losses[-1] < 1.1 * fit()[-1] + 0.02


def on_two_ranks(rank, ranks, folder):
    losses = fit(MSAMP("O2"), devices=ranks)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.distributed
def test_ddp_sends_gradients_of_any_size(tmp_path):
    launch(on_two_ranks, 2, tmp_path, tmp_path)
