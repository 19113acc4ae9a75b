"""Layers that are called where no precision's context is: Transformer Engine computes in high precision there."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TE
from tests.te.reference import current_scaling, fabric_for

MESSAGE = "outside of its precision's context, and so in high precision"


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, x):
        return self(x).sum()


@pytest.fixture
def fabric(reference_te):
    return fabric_for(FP8TE(current_scaling()))


def test_it_is_said(fabric):
    model, x = Steps(), torch.randn(16, 32)
    wrapped = fabric.setup(model)
    wrapped.mark_forward_method("training_step")
    for call in (model, wrapped.training_step):
        with pytest.warns(UserWarning, match=MESSAGE), pytest.raises(RuntimeError, match="CUDA"):  # its own GEMM
            call(x)


@pytest.mark.parametrize("context", [False, True])
def test_an_input_that_is_not_on_cuda_is_refused(pretend_gpu, context):
    layer = nn.Linear(32, 32)
    fabric = fabric_for(FP8TE("current"))
    fabric.setup(layer)
    with fabric.autocast() if context else nullcontext(), pytest.raises(RuntimeError, match="computes on CUDA only"):
        layer(torch.randn(16, 32))
