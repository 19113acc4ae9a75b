"""`update="moments"` is AdamA (arXiv 2305.19982): gradients of several backward passes are added to the moments."""

import pytest
import torch
from torch import nn, optim

from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.optimizer import add_masters, main_params

BETAS, RATE, DECAY, EPS = (0.8, 0.9), 1e-2, 0.1, 1e-8


def gradients(generator):
    """Three gradients of very different sizes."""
    return [torch.randn(64, 64, generator=generator) * 10.0**-k for k in range(3)]


def train(config, steps=4):
    """Train a weight in bf16; return its master after each step, and what AdamA's formulas give in float64."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(64, 64, generator=generator).bfloat16())
    optimizer = optim.AdamW([p], lr=RATE, betas=BETAS, weight_decay=DECAY, eps=EPS)
    x, m, v = p.detach().double(), 0.0, 0.0
    optimizer, pairs = add_masters(optimizer, config), []
    for step in range(1, steps + 1):
        micro = gradients(generator)
        for gradient in micro:
            (p.float() * gradient).sum().backward()
            assert p.grad is None
        optimizer.step()
        optimizer.zero_grad()
        rounded = [gradient.bfloat16().double() for gradient in micro]
        m = BETAS[0] * m + (1 - BETAS[0]) * sum(rounded)
        v = BETAS[1] * v + (1 - BETAS[1]) * sum(gradient.square() for gradient in rounded)
        root = (v / (1 - BETAS[1] ** step)).sqrt() + EPS
        x = x * (1 - RATE * DECAY) - RATE * (m / (1 - BETAS[0] ** step)) / root
        pairs.append((next(main_params(optimizer)).detach().double().clone(), x))
    return pairs


@pytest.mark.parametrize("form", ["fp32", "remainder"])
def test_steps_are_those_of_the_formulas(form):
    for master, expected in train(MasterConfig(form=form, update="moments")):
        torch.testing.assert_close(master, expected, rtol=0, atol=2e-6)


def test_moments_of_8_bits_are_right_on_average():
    """A step is at most 2 to 3 learning rates; codes have 3 bits of mantissa, rounded without bias."""
    for master, expected in train(MasterConfig(form="remainder", moments="8bit", update="moments")):
        assert (master - expected).abs().max() < RATE
        assert (master - expected).mean().abs() < RATE / 100


def test_other_optimizers_are_refused():
    p = nn.Parameter(torch.ones(4).bfloat16())
    config = MasterConfig(form="remainder", update="moments")
    matrix = nn.Parameter(torch.ones(2, 2).bfloat16())
    for optimizer in (optim.SGD([p]), optim.AdamW([p], amsgrad=True), optim.Muon([matrix])):
        with pytest.raises(ValueError, match="`update='moments'` adds gradients to the moments"):
            add_masters(optimizer, config)
