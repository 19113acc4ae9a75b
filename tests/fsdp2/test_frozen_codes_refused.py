"""Where a base that is stored as codes does not run, one sentence says what does."""

import lightning as L
import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO
from tests.torchao.test_frozen_codes import Net, X, peft_model

CPU = torch.device("cpu")


@pytest.fixture
def cut_layer():
    """A model of PEFT and its first layer, which tensor parallelism has cut after the base was stored as codes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, plugin = peft_model(), FP8TorchAO(frozen="codes")
    plugin.bind_device(CPU)
    plugin.convert_module(model)
    layer = model.base_model.model[0]
    parallelize_module(layer.base_layer, init_device_mesh("cpu", (1,)), ColwiseParallel())
    yield model, layer.base_layer
    dist.destroy_process_group()


def test_tensor_parallelism(cut_layer):
    _, layer = cut_layer
    message = r"stored as codes does not run with tensor parallelism.* Use `frozen='convert'`"
    with pytest.raises(RuntimeError, match=message):
        layer(X)


def test_merging_into_shards(cut_layer):
    model, layer = cut_layer
    codes = layer.weight.to_local().clone()
    with pytest.raises(RuntimeError, match=r"cannot be merged into a sharded weight.*`lowprec export`"):
        model.merge_adapter()
    assert torch.equal(layer.weight.to_local(), codes)


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="FSDP2 takes weights without gradients")
def test_torch_below_2_13():
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=FabricFSDP2Strategy(), plugins=FP8TorchAO(frozen="codes"))
    fabric.launch()
    try:
        with pytest.raises(
            RuntimeError, match=r"under FSDP2 needs torch 2\.13, got .*Use 'ddp', or `frozen='convert'`"
        ):
            fabric.setup_module(Net())
    finally:
        dist.destroy_process_group()
