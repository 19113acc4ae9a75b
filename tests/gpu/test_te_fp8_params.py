"""Weights kept and gathered in FP8, by Transformer Engine's kernels: one GPU, and FSDP2 over NCCL with itself."""

import os
from importlib.util import find_spec

import lightning as L
import pytest
import torch
from torch import distributed as dist
from torch import nn

from tests.gpu.device import DEVICE, DRY, NO_VALUES, process_group_if_no_nccl
from tests.gpu.subjects import WIDTH, batches
from tests.gpu.test_te import every_recipe, plugin_for
from tests.toys import Stack, gelu_block

pytestmark = pytest.mark.skipif(DRY or find_spec("transformer_engine") is None, reason="needs Transformer Engine's GPU")
one_scale = pytest.mark.parametrize("recipe", ["delayed", "current"])


@pytest.fixture(autouse=True)
def own_process_group():
    before = dict(os.environ)
    process_group_if_no_nccl()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


class Layers(Stack):
    """Without norms, whose weights FSDP2 gathers in bf16, and without an output head."""

    def __init__(self, width=WIDTH):
        super().__init__(lambda: gelu_block(width, norm=False), seed=0)


def train(recipe, strategy=None, steps=6, **options):
    """Losses of steps of two micro-batches, an evaluation at the end, and the model."""
    plugin = plugin_for(recipe, **options)
    fabric = L.Fabric(
        accelerator="cuda", devices=1, plugins=plugin, **({} if strategy is None else {"strategy": strategy})
    )
    if strategy is not None:
        fabric.launch()
    model = Layers()
    module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    losses, inputs = [], [x.to(DEVICE).bfloat16() for x, _ in batches(2)]
    for _ in range(steps):
        for x in inputs:
            loss = nn.functional.mse_loss(module(x).float(), x.float().flip(-1))
            fabric.backward(loss / 2)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    module.eval()
    with torch.no_grad():
        losses += [nn.functional.mse_loss(module(x).float(), x.float().flip(-1)).item() for x in inputs]
    return losses, model


@every_recipe
def test_kept_weights_change_nothing(recipe):
    kept, model = train(recipe, fp8_params=True)
    plain, _ = train(recipe, weight_cache=False)
    if recipe == "delayed":  # has another scale for the second quantisation of the same weight
        assert kept == pytest.approx(plain, rel=2e-2) or NO_VALUES
    else:
        assert kept == plain or NO_VALUES
    assert kept[-1] < 0.9 * kept[0] or NO_VALUES
    assert all(layer._fp8_workspaces for block in model.blocks for layer in (block[0], block[2]))


def test_gathered_codes_are_those_of_its_kernel():
    from transformer_engine.pytorch import DType, Float8CurrentScalingQuantizer

    from lightning_lowprec.te.fp8_weight import TEWireFormat

    torch.manual_seed(0)
    wire = TEWireFormat()
    for scale in (1.0, 1e-3, 300.0):
        weight = scale * torch.randn(512, 256, device=DEVICE)
        its = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, DEVICE)(weight)
        ours = wire.scales(weight.abs().amax())
        if not NO_VALUES:
            torch.testing.assert_close(ours.reciprocal().reshape(1), its._scale_inv.reshape(1), rtol=2**-22, atol=0)
        equal = wire.encode(weight, ours).view(torch.uint8) == its._data
        assert equal.float().mean() > 0.999 or NO_VALUES  # a bit of the scale moves what lies on an edge


@one_scale
def test_training_with_gathered_codes(recipe):
    """FSDP2 with one rank gathers as with many; the losses are those without it."""
    from lightning_lowprec import FabricFSDP2Strategy

    sharded, _ = train(recipe, FabricFSDP2Strategy(fp8_all_gather=True))
    alone, _ = train(recipe)
    assert sharded == pytest.approx(alone, rel=2e-2) or NO_VALUES
    assert sharded[-1] < 0.9 * sharded[0] or NO_VALUES


def test_a_gathered_weight_leaves_no_transpose_behind():
    """Hopper's backward GEMM takes the transpose; it must go with the graph, or every weight would stay whole."""
    from lightning_lowprec import FabricFSDP2Strategy

    plugin, before = plugin_for("current"), torch.cuda.memory_allocated()
    fabric = L.Fabric(accelerator="cuda", devices=1, strategy=FabricFSDP2Strategy(fp8_all_gather=True), plugins=plugin)
    fabric.launch()
    model = Layers(2048)
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    x, held = torch.randn(64, 2048, device=DEVICE).bfloat16(), []
    for _ in range(3):
        fabric.backward(module(x).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        held.append(torch.cuda.memory_allocated() - before)
    assert held[2] - held[1] < weights / 10
    assert held[2] < 4 * weights + weights / 2 + 2**26  # float32 shards, at most half a byte, and workspaces


class Adapted(nn.Module):
    """Frozen layers with low-rank ones beside them."""

    def __init__(self, width):
        super().__init__()
        self.base = Layers(width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 16, bias=False), nn.Linear(16, width, bias=False)

    def forward(self, x):
        return self.base(x + self.up(self.down(x)))


def adapt(recipe, width, **options):
    """Losses of training the adapters, and the bytes that the model holds on the GPU."""
    plugin = plugin_for(recipe, keep=["down", "up"], **options)
    before = torch.cuda.memory_allocated()
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=plugin)
    model = Adapted(width)
    module, optimizer = fabric.setup(
        model, torch.optim.AdamW([*model.down.parameters(), *model.up.parameters()], lr=3e-3)
    )
    losses = []
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(2)).to(DEVICE).bfloat16()
    for _ in range(6):
        loss = nn.functional.mse_loss(module(x).float(), x.float().flip(-1))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    del loss
    return losses, torch.cuda.memory_allocated() - before


@one_scale
def test_frozen_weights_take_one_byte(recipe):
    adapt(recipe, 64)  # cuBLAS takes its workspaces at the first product
    in_fp8, held = adapt(recipe, 1024, fp8_params=True)
    in_full, held_in_full = adapt(recipe, 1024)
    assert in_fp8 == pytest.approx(in_full, rel=2e-2) or NO_VALUES
    frozen = 2 * 2 * 1024 * 2048
    assert held_in_full - held == pytest.approx(3 * frozen, rel=0.05)
