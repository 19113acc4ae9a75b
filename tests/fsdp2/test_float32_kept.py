"""Parameters that stay float32 are gathered and reduced as float32, beside the others of their block."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FabricFSDP2Strategy, HalfMixed
from tests.fsdp2.ranks import run
from tests.fsdp2.toy import full

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
NAMES = ("bf16-master", "bf16-remainder", "bf16-sr", "bf16-8bit", "fp8-hybrid", "fp8-hybrid-remainder")
STEPS = 3


class Mixer(nn.Module):
    """A block whose float32 parameters lie beside others: a decay, a step's bias, and a router's correction."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.A_log = nn.Parameter(torch.linspace(0.1, 2.0, 64))
        self.dt_bias = nn.Parameter(torch.linspace(-1.0, 1.0, 64))

    def forward(self, x):
        seen.append((self.A_log.dtype, self.dt_bias.dtype, self.up.weight.dtype))
        h = self.up(self.norm(x))
        h = h * torch.exp(-torch.exp(self.A_log.float()) * torch.sigmoid(h + self.dt_bias)).to(h.dtype)
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Mixer() for _ in range(2)])
        self.final = nn.LayerNorm(32)
        self.head = nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.full((16,), 1.001))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x)) * self.scale


seen: list = []


def plugin(name):
    if name == "named":
        return {"plugins": HalfMixed("bf16", master_weights="remainder", keep_fp32=["final", "scale", "*.norm"])}
    return {"precision": name}


def train(name, strategy, devices):
    """All ranks see one batch: the average of their gradients is each of them, without an error."""
    strategy = FabricFSDP2Strategy(fp8_all_gather=False) if strategy == "fsdp2" else strategy
    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy, **plugin(name))
    fabric.launch()
    seen.clear()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(8, 32, generator=generator)).float().square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, full(dict(net.named_parameters())), set(seen)


def on_two_ranks(rank):
    return {name: train(name, "fsdp2", 2) for name in (*NAMES, "named")}


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 gathers all parameters of a module in one dtype")
def test_two_ranks_are_one_bit_for_bit(tmp_path):
    ranks = run(on_two_ranks, 2, tmp_path)
    for name in (*NAMES, "named"):
        losses, weights, dtypes = train(name, "auto", 1)
        half = torch.float32 if name == "fp8-hybrid" else torch.bfloat16
        assert dtypes == {(torch.float32, torch.float32, half)}, name
        for other_losses, other, gathered in (rank[name] for rank in ranks):
            assert gathered == {(torch.float32, torch.float32, torch.bfloat16)}, name
            assert {fqn for fqn, value in other.items() if value.dtype == torch.float32} >= {
                f"blocks.{i}.{part}" for i in range(2) for part in ("A_log", "dt_bias")
            }
            if half == torch.float32:  # FSDP2 gathers the norms of this name as bf16
                continue
            assert other_losses == losses, name
            assert all(torch.equal(other[fqn].to(value.dtype), value) for fqn, value in weights.items()), name
