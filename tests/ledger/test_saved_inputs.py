"""Memory of one 8B-shaped block, forward and backward, with the values and with the codes of inputs."""

import gc
from dataclasses import replace
from functools import cache, partial

import lightning as L
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.gpu_lane import models
from lightning_lowprec import FP8TorchAO
from lightning_lowprec.products.scaled import Scaled

SHAPE = replace(models.SHAPES["8b"], layers=1, vocab=1024)
TOKENS = 2 * SHAPE.sequence
IN_VALUES = 2 * (6 * SHAPE.hidden + SHAPE.ffn)  # three, one and two copies in bf16, and the input of `down_proj`
IN_CODES = 3 * SHAPE.hidden + SHAPE.ffn
SAVING = TOKENS * (IN_VALUES - IN_CODES)
PRODUCTS = torch.ops.aten._scaled_mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default


def policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS = partial(create_selective_checkpoint_contexts, policy)
WAYS = {
    "plain": lambda block, *args: block(*args),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=CONTEXTS),
}


@cache
def memory(saved, compiled, ways=tuple(WAYS)):
    """Bytes of each way: held between forward and backward, and the peak of both. Float32 weights."""
    plugin = FP8TorchAO(saved_inputs=saved, compile="auto" if compiled else False)
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=plugin)
    net = models.build(SHAPE, fabric.device)
    fabric.setup_module(net)
    x = torch.zeros(2, SHAPE.sequence, SHAPE.hidden, device=fabric.device, requires_grad=True)

    def step(way):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with fabric.autocast():
            out = WAYS[way](net.layers[0], x, net.turn)
        held = torch.cuda.memory_allocated() - before
        out.backward(torch.zeros_like(out))
        return held, torch.cuda.max_memory_allocated() - before

    found = {}
    for way in ways:
        step(way)  # gradients exist from here on
        found[way] = step(way)
    return found


@pytest.mark.filterwarnings("ignore:.*are expected to be slower in FP8")
@pytest.mark.parametrize("way", WAYS)
def test_an_eager_block_needs_less(way):
    """Within a checkpoint the inputs are kept while one block runs its backward."""
    values, codes = memory("values", False)[way], memory("codes", False)[way]
    assert values[0] - codes[0] == pytest.approx(SAVING if way == "plain" else 0, abs=1e5)
    assert values[1] - codes[1] >= 0.9 * SAVING


def test_siblings_share_on_one_stream_and_not_while_a_graph_is_captured(monkeypatch):
    made, encode = [], Scaled.encoded

    def noting(self, matrix, role):
        made.extend([1] * (role == "input"))
        return encode(self, matrix, role)

    monkeypatch.setattr(Scaled, "encoded", noting)
    plugin = FP8TorchAO(saved_inputs="codes", compile=False)
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=plugin)
    layer = torch.nn.Linear(64, 64, device=fabric.device)
    fabric.setup_module(torch.nn.ModuleList([layer]))
    x = torch.zeros(16, 64, device=fabric.device)
    layer(x), layer(x)
    assert len(made) == 1
    with torch.cuda.stream(torch.cuda.Stream()):
        layer(x), layer(x)
    assert len(made) == 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # the null GPU captures nothing
    layer(x), layer(x)
    assert len(made) == 4


@pytest.mark.filterwarnings("ignore:.*are expected to be slower in FP8")
def test_a_compiled_block_keeps_codes_by_itself():
    """torch's partitioner keeps the smaller tensor: the default holds as little, and its peak is no higher."""
    values, codes = (memory(saved, True, ("plain",))["plain"] for saved in ("values", "codes"))
    assert values[0] == codes[0]
    assert values[1] <= codes[1]
