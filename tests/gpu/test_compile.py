"""compile="auto" on a GPU: no graph breaks, one compilation for all blocks, the loss of the eager run."""

import lightning as L
import pytest
import torch
from torch._dynamo.utils import counters

from lightning_lowprec import FP8TorchAO
from tests.gpu.device import DEVICE, DRY, NO_VALUES, on_gpu_only
from tests.gpu.subjects import Stack, batches

pytestmark = pytest.mark.rehearsed  # tests/ledger/test_steps.py shows graphs and breaks of compiled blocks
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
STEPS = 8
TOLERANCE = 0.02
"""Relative difference of the losses: fusion moves roundings of bf16, and FP8 codes with them."""


def losses(plugin, tokens=48, steps=STEPS):
    torch.manual_seed(0)
    fabric = L.Fabric(accelerator=DEVICE.type, devices=1, plugins=plugin)
    module = fabric.setup_module(Stack(depth=3))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-3))
    data = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(1, tokens)]
    found = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(module(data[0][0]).float(), data[0][1])
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found, module


@pytest.mark.parametrize("recipe", RECIPES[:1] if DRY else RECIPES)
@pytest.mark.parametrize("base", ["bf16", "fp16"])
def test_no_graph_breaks_and_the_same_losses(recipe, base):
    if base == "fp16" and (recipe != "tensorwise" or DRY):
        pytest.skip("not a combination, or slow on CPU")
    eager, _ = losses(FP8TorchAO(recipe=recipe, base=base, compile=False))
    counters.clear()
    compiled, module = losses(FP8TorchAO(recipe=recipe, base=base, compile=True if DRY else "auto"))
    assert not counters["graph_break"], dict(counters["graph_break"])
    # the first block's input has no gradient, that of the others has
    assert counters["stats"]["unique_graphs"] <= 2, "equal blocks share their code"
    blocks = module.module.blocks if hasattr(module, "module") else module.blocks
    assert all(block._compiled_call_impl is not None for block in blocks)
    assert compiled == pytest.approx(eager, rel=TOLERANCE) or NO_VALUES
    assert compiled[-1] < compiled[0] or NO_VALUES


@on_gpu_only
def test_ragged_batches_compile_a_few_times_only():
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=FP8TorchAO())
    module = fabric.setup_module(Stack(depth=3))
    counters.clear()
    for tokens in (48, 40, 17, 23, 31, 5, 64, 47, 33, 21):
        loss = module(torch.randn(tokens, 128, device=DEVICE)).pow(2).mean()
        fabric.backward(loss)
        assert torch.isfinite(loss) or NO_VALUES
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] <= 10, "sizes are not compiled as dynamic"


@on_gpu_only
def test_cuda_graphs():
    """Compiled regions that follow each other are one iteration of a tree of graphs while a backward is pending.

    Dynamic scaling keeps no state, so no input is mutated: nothing may be left out (torch.compiler_cudagraph_trees).
    """
    from torch._inductor.cudagraph_trees import get_manager

    eager, _ = losses(FP8TorchAO(compile=False))
    counters.clear()
    graphs, _ = losses(FP8TorchAO(compile={"mode": "reduce-overhead"}))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert get_manager(DEVICE.index, create_if_none_exists=False) is not None, "no graph was recorded"
    assert graphs == pytest.approx(eager, rel=TOLERANCE) or NO_VALUES


@on_gpu_only
def test_a_model_that_the_user_compiled_is_left_alone():
    torch.manual_seed(0)
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=FP8TorchAO())
    model = torch.compile(Stack())
    module = fabric.setup_module(model)
    x = torch.randn(32, 128, device=DEVICE)
    module(x).sum().backward()
    assert all(block._compiled_call_impl is None for block in model._orig_mod.blocks)
