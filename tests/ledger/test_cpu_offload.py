"""Optimizer state in CPU memory on the null GPU: `cpu_offload=True` of FSDP2, and torchao's CPUOffloadOptimizer."""

from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torchao.optim import CPUOffloadOptimizer

from benchmarks.ledger.world_case import OneOfMany
from lightning_lowprec import FabricFSDP2Strategy
from tests.ledger.counted import fake_world

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries, about this machine
RATE, DECAY = 0.25, 1.0


def set_up(precision, make, **options):
    fabric = L.Fabric(accelerator="cuda", devices=1, precision=precision, **options)
    fabric.launch()
    model = fabric.setup_module(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)))
    return fabric, model, fabric.setup_optimizers(make(model.parameters(), lr=RATE, weight_decay=DECAY))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-remainder", "bf16-sr", "bf16-8bit", "fp8-hybrid-8bit"])
def test_shards_in_cpu_memory_are_updated(precision):
    """Gradients are zero on the null GPU, so that AdamW multiplies the weights, which are real, by 1 - 0.25."""
    fake_world(2)
    strategy = FabricFSDP2Strategy(cluster_environment=OneOfMany(2), cpu_offload=True)
    fabric, model, optimizer = set_up(precision, torch.optim.AdamW, num_nodes=2, strategy=strategy)
    assert fabric.strategy.process_group_backend == "cpu:gloo,cuda:nccl"
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().fill_(1.0)
    for step in (1, 2):
        fabric.backward(model(torch.zeros(8, 256, device=fabric.device)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            assert torch.all(p.to_local().detach().float() == (1 - RATE * DECAY) ** step)
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    held = [getattr(value, "_local_tensor", value) for value in state]
    assert {value.device.type for value in held} == {"cpu"}
    assert any(value.dtype == torch.float8_e4m3fn for value in held) == ("8bit" in precision)


OFFLOADED = partial(CPUOffloadOptimizer, optimizer_class=torch.optim.AdamW)


@pytest.mark.parametrize("precision", ["half-auto", "fp8-hybrid", "fp8-hybrid-te"])
def test_torchao_offloads_float32_weights(precision, recwarn):
    fabric, model, optimizer = set_up(precision, OFFLOADED)
    plain = optimizer.optimizer
    for copy in plain.param_d2h_map.values():
        copy.fill_(1.0)
    written = [p._version for p in plain.param_d2h_map]
    for step in (1, 2):
        fabric.backward(model(torch.zeros(8, 256, device=fabric.device)).float().square().mean())
        for copy in plain.param_d2h_map.values():
            copy.grad.zero_()  # pinned memory that the null GPU did not write
        optimizer.step()
        optimizer.zero_grad()
        assert len(plain.param_d2h_map) == 2, "the biases are small"
        for copy in plain.param_d2h_map.values():
            assert torch.all(copy == (1 - RATE * DECAY) ** step)
    assert all(p._version > before for p, before in zip(plain.param_d2h_map, written, strict=True))
    fabric.backward(model(torch.zeros(8, 256, device=fabric.device)).float().square().mean())
    assert not [warning for warning in recwarn if "in no optimizer" in str(warning.message)]
    with pytest.raises(TypeError, match="does not go with clipping, because it copies each gradient"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


@pytest.mark.parametrize(
    ("precision", "reason"),
    [
        ("bf16-remainder", "half-precision weights"),
        ("fp8-hybrid-8bit", "half-precision weights"), ("fp8-hybrid-fp16", "loss scaling"),
        ("msamp-o2", "the weights of MS-AMP"),
    ],
)  # fmt: skip
def test_torchao_offload_is_refused_with_the_way_out(precision, reason):
    with pytest.raises(TypeError, match=reason) as caught:
        set_up(precision, OFFLOADED)
    assert "`strategy=FSDP2Strategy(cpu_offload=True)`, on one device too" in str(caught.value)
