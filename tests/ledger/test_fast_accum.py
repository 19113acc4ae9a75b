"""The flag for fast accumulation as a GPU's kernels get it."""

import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO
from tests.torchao.test_recipe_per_layer import FAST, flags_of_a_step


@pytest.mark.parametrize("choice", FAST)
def test_the_choice_reaches_the_kernels_of_a_gpu(choice):
    model = nn.Sequential(nn.Linear(64, 128)).cuda()
    plugin = FP8TorchAO(fast_accum=choice, compile=False)
    plugin.bind_device(torch.device("cuda"))
    plugin.convert_module(model)
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        assert flags_of_a_step(model, x) == FAST[choice]
