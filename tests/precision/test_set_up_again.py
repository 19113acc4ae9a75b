"""A model that ran in FP8 and is set up in another precision runs in that one, not in what it was converted to."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def run(plugin: object, model: nn.Module) -> torch.Tensor:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    wrapped = L.Fabric(accelerator="cpu", devices=1, plugins=plugin).setup(model)
    output = wrapped(x)
    output.square().mean().backward()
    return output.detach()


@pytest.mark.parametrize(
    "make", [lambda: HalfMixed("bf16"), lambda: HalfMixed("bf16", master_weights=True), lambda: MSAMP("O1")]
)
def test_after_fp8(make: type) -> None:
    model, fresh = net(), net()
    fp8 = run(FP8TorchAO(), model)
    model.zero_grad()
    found, expected = run(make(), model), run(make(), fresh)
    assert torch.equal(found, expected)
    assert not torch.equal(found.float(), fp8.float())
    assert [type(m) for m in model.modules()] == [type(m) for m in fresh.modules()]
