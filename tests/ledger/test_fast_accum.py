"""The flag for fast accumulation as a GPU's kernels get it: `{"forward": "promoted"}` clears it for one layer."""

import torch
from torch import nn

from lightning_lowprec import FP8TorchAO
from tests.torchao.test_recipe_per_layer import flags_of_a_step


def test_promotion_reaches_the_kernels_of_a_gpu():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).cuda()
    plugin = FP8TorchAO({"1": {"forward": "promoted"}, "*": "tensorwise"}, compile=False)
    plugin.bind_device(torch.device("cuda"))
    plugin.convert_module(model)
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        assert flags_of_a_step(model, x) == [True, False] + [False] * 4
