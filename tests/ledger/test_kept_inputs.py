"""Memory of one 8B-shaped block between forward and backward: values of inputs, or the codes that a compiler keeps."""

import gc
from dataclasses import replace

import lightning as L
import pytest
import torch

from benchmarks.rivals import models
from lightning_lowprec import FP8TorchAO

SHAPE = replace(models.SHAPES["8b"], layers=1, vocab=1024)
TOKENS = 2 * SHAPE.sequence
IN_VALUES = 2 * (6 * SHAPE.hidden + SHAPE.ffn)  # three, one and two copies in bf16, and the input of `down_proj`
IN_CODES = 3 * SHAPE.hidden + SHAPE.ffn
SAVING = TOKENS * (IN_VALUES - IN_CODES)


def held(compiled):
    """Bytes held between forward and backward. Float32 weights."""
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=FP8TorchAO(compile="auto" if compiled else False))
    net = models.build(SHAPE, fabric.device)
    fabric.setup_module(net)
    x = torch.zeros(2, SHAPE.sequence, SHAPE.hidden, device=fabric.device, requires_grad=True)
    for _ in range(2):  # gradients exist from the second step on
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        with fabric.autocast():
            out = net.layers[0](x, net.turn)
        bytes_held = torch.cuda.memory_allocated() - before
        out.backward(torch.zeros_like(out))
    return bytes_held


@pytest.mark.filterwarnings("ignore:.*are expected to be slower in FP8")
def test_a_compiled_block_keeps_codes_by_itself():
    """torch's partitioner keeps the smaller tensor."""
    assert held(compiled=False) - held(compiled=True) >= SAVING
