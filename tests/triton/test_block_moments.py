"""The kernel keeps moments in 8 bits: the same codes as torch's own operations, in every form of masters."""

import pytest
import torch
from torch import nn, optim

from lightning_lowprec.masters import kernel_step
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.optimizer import add_masters

OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2),
    "adam": lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1, betas=(0.4, 0.9)),
    "momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1),
}


SHAPES = (48, 96), (8, 3, 256), (65, 64), (65,)
"""Blocks of 32, 256 and 64 numbers, rows that the kernel's pieces do not end with, and one that keeps float32."""


def train(make, steps=3, params=None, optimizer=None, first=0, **config):
    """Step with gradients that do not depend on the weights, so that one code that differs stays alone."""
    if params is None:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]
        optimizer = add_masters(make(params), MasterConfig(**config))
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        grads = [torch.randn(shape, generator=generator) * 10.0 ** (-i) for i, shape in enumerate(SHAPES)]
        sum((p.float() * g).sum() for p, g in zip(params, grads, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return params, optimizer


@pytest.mark.parametrize(
    ("form", "make"),
    [
        ("fp32", "adamw"),
        ("remainder", "adamw"),
        ("stochastic", "adam"),
        ("stochastic", "momentum"),
        ("remainder", "momentum"),
    ],
)
def test_steps_as_torchs_operations_do(form, make, launches, monkeypatch):
    ours, optimizer = train(OPTIMIZERS[make], form=form, moments="8bit")
    assert launches
    assert {row.moment for rows in launches for row in rows} == {"8bit", "fp32"}, "biases keep float32 moments"
    monkeypatch.setattr(kernel_step, "DEVICES", set())
    reference, theirs = train(OPTIMIZERS[make], form=form, moments="8bit")
    for a, b in zip(ours, reference, strict=True):
        assert (a != b).sum() <= 2 + a.numel() // 500  # float32 is rounded in another order, so a code may differ
        state, expected = optimizer.state[a], theirs.state[b]
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            if value.element_size() == 1:
                differ = (state[name].view(torch.uint8) != value.view(torch.uint8)).sum()
                assert differ <= 2 + value.numel() // 500
            else:
                torch.testing.assert_close(state[name], value, rtol=1e-2, atol=1e-6)


def test_the_kernel_makes_the_first_step_too(launches):
    """Float32 moments of a large parameter are never in memory. Those of the bias are made by torch."""
    _, optimizer = train(OPTIMIZERS["adamw"], 1, form="remainder", moments="8bit")
    assert [len(rows) for rows in launches] == [1, 1, 1]
    assert all(state["step"] == 1 for state in optimizer.state.values())
