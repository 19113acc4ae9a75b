"""`grad_accumulation_dtype=torch.float32` on one device: sums of micro-batches that half precision rounds away."""

import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_lowprec import FP8TorchAO, HalfMixed, LossScale, plain, register, unregister

FLOAT32 = {"grad_accumulation_dtype": torch.float32}
FORMS = {"master": True, "remainder": "remainder", "8bit": "8bit", "sr": "stochastic"}
TERMS = [2048.0, *[0.5] * 8]
"""Their sum is 2052. bf16 and fp16 have no number between 2048 and 2049, so that there each sum stays 2048."""


def half(name: str, **options: Any) -> HalfMixed:
    """A plugin with masters; fp16 starts at a loss scale at which nothing overflows."""
    base, _, form = name.partition("-")
    scale = {"loss_scale": LossScale(initial=8.0)} if base == "fp16" else {}
    return HalfMixed(base, master_weights=FORMS[form], **scale, **options)


class Recording(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        self.given = [p.grad.clone() for group in self.param_groups for p in group["params"]]


class Terms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def summed(plugin: HalfMixed, model: nn.Module) -> Tensor:
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    module, optimizer = fabric.setup(model, Recording(model.parameters(), lr=0.0))
    for term in TERMS:
        fabric.backward(module(torch.full((16,), term)))
    optimizer.step()
    (gradient,) = optimizer.optimizer.given
    return gradient


@pytest.mark.parametrize("form", ["bf16-master", "bf16-remainder", "bf16-sr", "fp16-master"])
def test_the_sum_is_that_of_float32(form):
    assert torch.equal(summed(half(form, **FLOAT32), Terms()), torch.full((16,), 2052.0))
    assert torch.equal(summed(half(form), Terms()), torch.full((16,), 2048.0)), "there was nothing to gain"


def test_a_copied_module_and_one_whose_optimizer_comes_late_accumulate_in_float32():
    first = Terms()
    L.Fabric(accelerator="cpu", devices=1, plugins=half("bf16-master", **FLOAT32)).setup(first)
    second = copy.deepcopy(first)
    assert second.weight.dtype == torch.float32
    assert torch.equal(summed(half("bf16-master", **FLOAT32), second), torch.full((16,), 2052.0))
    unregister()
    try:
        assert torch.equal(summed(half("bf16-master", **FLOAT32), Terms()), torch.full((16,), 2052.0))
    finally:
        register()


@pytest.mark.parametrize(("options", "sum"), [(FLOAT32, 1 + 2.0**-10), ({}, 1.0)])  # which is no bf16 number
def test_sparse_gradients_add_up_in_float32(options, sum):
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=half("bf16-master", **options))
    table = nn.Embedding(4, 2, sparse=True)
    start = table.weight.detach().clone()
    module, optimizer = fabric.setup(table, torch.optim.SGD(table.parameters(), lr=1.0))
    for scale in (1.0, 2.0**-10):
        fabric.backward((module(torch.tensor([1, 1])) * scale).sum())
    optimizer.step()
    start[1] -= 2 * sum
    assert torch.equal(plain(module).weight, start)


@pytest.mark.parametrize("make", [HalfMixed, FP8TorchAO])
def test_refusals(make):
    field = "grad_accumulation_dtype"
    with pytest.raises(ValueError, match=f"`{field}=torch.float32` goes with `master_weights`.*always .* in float32"):
        make(**{field: torch.float32})
    for wrong in (torch.bfloat16, torch.float64, "fp32"):
        with pytest.raises(ValueError, match=rf"`{field}={wrong!r}` is not valid; expected .*: None.*torch.float32"):
            make(master_weights=True, **{field: wrong})
    for host, options in ((L.Trainer, {"logger": False}), (L.Fabric, {})):
        with pytest.raises(ValueError, match=r"`grad_accumulation_dtype=torch.float32` does not run under .*'fsdp2'"):
            host(accelerator="cpu", strategy="ddp", plugins=make(master_weights=True, **FLOAT32), **options)
