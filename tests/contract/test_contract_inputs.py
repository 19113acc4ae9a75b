"""Inputs that ``nn.Linear`` refuses: layers with FP8 GEMMs refuse them with the same words."""

import lightning as L
import pytest
import torch
from torch import nn

NAMES = ("fp8-hybrid", "fp8-rowwise", "fp8-rowwise-gw-hp", "msamp-o1", "msamp-o2", "msamp-o3")
INPUTS = {
    "complex": torch.ones(16, 32, dtype=torch.complex64),
    "integers": torch.ones(16, 32, dtype=torch.int64),
    "too many features": torch.ones(16, 48),
    "too few features": torch.ones(2, 16, 31),
    "a vector that is too short": torch.ones(16),
}


def message(layer, x):
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError) as error:
        layer(x)
    return str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_linear_refuses_is_refused_with_its_words(name):
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)
    model = fabric.setup_module(nn.Sequential(nn.Linear(32, 32), nn.ReLU())).module
    assert type(model[0]) is not nn.Linear
    for mode in (model.train, model.eval):
        mode()
        for what, x in INPUTS.items():
            assert message(model[0], x) == message(nn.Linear(32, 32), x), what
