"""A model of Transformer Engine's layers that is set up in another precision, and the other way round."""

import pytest
import torch

from lightning_lowprec import FP8TE, MSAMP, FP8TorchAO, HalfMixed
from tests.te import reference
from tests.te.subjects import Net, fabric_for

BEFORE = {
    "current": lambda: FP8TE("current"),
    "delayed": lambda: FP8TE("delayed"),
    "custom": lambda: FP8TE(reference.current_scaling(), norms=False),
    "torchao": FP8TorchAO,
    "half": lambda: HalfMixed("bf16"),
}
AFTER = {
    "torchao": FP8TorchAO,
    "half": lambda: HalfMixed("bf16"),
    "msamp": lambda: MSAMP("O1"),
    "custom": lambda: FP8TE(reference.current_scaling(), norms=False),
    "nvfp4": lambda: FP8TE(reference.nvfp4(), norms=False),
}


def run(plugin, model):
    wrapped = fabric_for(plugin).setup(model)
    for seed in range(3):  # weights may be kept from the second on
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
        output = wrapped(x)
        output.square().mean().backward()
    return [output, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
def test_it_runs_as_if_it_had_been_nothing_before(reference_te, before, after):
    model, fresh = Net(), Net()
    if before in ("custom", "torchao", "half"):
        run(BEFORE[before](), model)
        model.zero_grad()
    else:  # no kernels here
        fabric_for(BEFORE[before]()).setup(model)
    found, expected = run(AFTER[after](), model), run(AFTER[after](), fresh)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [type(m) for m in model.modules()] == [type(m) for m in fresh.modules()]
