"""Parameters of codes, their gradients and steps, for the tests of ScaledAdamW."""

import pytest
import torch
from torch import nn

from lightning_lowprec.msamp import scale_weight_
from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.weight import codes_of

LEVELS = ["O1", "O2", "O3"]
SHAPES = [(33, 17), (5,), (64, 8), (1,), (3, 2, 5)]
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
every_level = pytest.mark.parametrize("level", LEVELS)


def starts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = [1.0, 1e-3, 30.0, 1e-6, 0.1]
    return [torch.randn(s, generator=generator) * f for s, f in zip(SHAPES, sizes, strict=True)]


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(s, generator=generator) * 10.0 ** -(i + step % 3) for i, s in enumerate(SHAPES)]


def scaled_params(level, values=None):
    params = [nn.Parameter(v.clone()) for v in (starts() if values is None else values)]
    for p in params:
        scale_weight_(p, level)
    return params


def accumulate(p, grad):
    """Add a gradient, any float, to the ScaledGradient of ``p``."""
    if p.grad is None:
        p.grad = ScaledGradient.of(grad)
    else:
        p.grad.add_(grad)


def give(params, step, coded):
    for p, g in zip(params, gradients(step), strict=False):  # of some or of all
        if coded:
            accumulate(p, g)
        else:
            p.grad = g


def run(optimizer, params, steps, coded=True):
    for step in steps:
        give(params, step, coded)
        optimizer.step()
        optimizer.zero_grad()


def bits(params):
    return [
        (
            codes_of(p).clone().view(torch.uint8 if codes_of(p).itemsize == 1 else torch.int16),
            p.msamp_state.scale.item(),
        )
        for p in params
    ]


def same(a, b):
    return all(torch.equal(x, y) and s == t for (x, s), (y, t) in zip(a, b, strict=True))
