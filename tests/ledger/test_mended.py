"""What the null GPU showed once and must not show again: counted on the null GPU, where CUDA tensors have no values."""

from dataclasses import replace

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from benchmarks.ledger import triton_bytes
from benchmarks.ledger.recorder import recording
from benchmarks.rivals import models
from lightning_lowprec import MSAMP, FP8TorchAO, FSDP2Strategy
from lightning_lowprec.fsdp2.fp8_gather import Fp8GatherShard, GatherScales
from lightning_lowprec.msamp import scale_linears
from lightning_lowprec.numerics.one_pass import compiles
from lightning_lowprec.private.torch import local_tensor
from tests.ledger.counted import fake_world
from tests.torchao.test_fp8_linear import linear

pytestmark = pytest.mark.usefixtures("fresh")
DEVICE = torch.device("cuda")
NOT_SWITCHED = torch.Size([64, 64]), (64, 1), torch.nn.Linear(1, 1), MixedPrecisionPolicy()
"""What FSDP2 says of a weight: shape and strides of the whole, its module, and the policy."""


def toy_step(fabric):
    fabric.launch()
    bare = models.build(models.TOY, DEVICE)
    model = fabric.setup_module(bare)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), fused=True))
    (batch,) = models.batches(models.TOY, 4, DEVICE, count=1)

    def step():
        loss = model(*batch)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step, bare


@pytest.mark.filterwarnings("ignore:.*are expected to be slower in FP8")
@pytest.mark.parametrize(
    ("plugin", "offload", "times"),
    [
        (FP8TorchAO(compile=False), False, 1),
        (FP8TorchAO(compile=False, weight_codes="per_gemm"), False, 2),
        (FP8TorchAO(compile=False), True, 2),
    ],
    ids=["torchao", "per_gemm", "cpu_offload"],
)
def test_a_shard_is_encoded_by_one_kernel(plugin, offload, times):
    """Once per step, or in forward and in backward; 5 bytes per element; no shape nor later step compiles anew."""
    triton_bytes.start("shards")
    strategy = FSDP2Strategy(process_group_backend="fake", cpu_offload=offload)
    step, bare = toy_step(L.Fabric(accelerator="cuda", devices=1, strategy=strategy, plugins=plugin))
    step()
    graphs = counters["stats"]["unique_graphs"]
    triton_bytes.forget_launches()
    with recording() as log:
        step()
    assert counters["stats"]["unique_graphs"] == graphs == times  # with autocast, and in backward without
    shards = [s for p in bare.parameters() if isinstance(s := local_tensor(p), Fp8GatherShard)]
    encoding = [record for record in log.of("kernel") if record.name.startswith("triton_")]
    assert len({s.shape for s in shards}) > 3
    assert len(encoding) == times * len(shards) == times * 14
    assert offload or not log.waits()
    assert {record.name for record in encoding} == set(triton_bytes.KERNELS)
    elements = sorted(s.numel() for s in shards for _ in range(times))
    moved = sorted(triton_bytes.LAUNCHES.values())
    assert all(5 * n <= found <= 5 * n + 8 for n, found in zip(elements, moved, strict=True))


def test_streams_share_the_memory_of_codes_in_order(monkeypatch):
    """`unshard()` gathers on the stream that computes, a forward on the stream that copies; a refresh allocates."""
    fake_world(1)
    mesh = dist.init_device_mesh("cuda", (1,))
    scales = GatherScales(replace(linear().wire_format, per_step=True))
    weight = DTensor.from_local(Fp8GatherShard(torch.zeros(64, 64, device=DEVICE), scales), mesh, [Shard(0)])
    scales.weights, shard = [weight], local_tensor(weight)
    waits, wait = [], torch.cuda.Stream.wait_stream
    monkeypatch.setattr(
        torch.cuda.Stream, "wait_stream", lambda own, other: (waits.append((own, other)), wait(own, other))
    )
    computing, copying = torch.cuda.current_stream(), torch.cuda.Stream()

    def sent(stream):
        with torch.cuda.stream(stream):
            ((codes,), _) = shard.fsdp_pre_all_gather(mesh, *NOT_SWITCHED)
        return codes.data_ptr()

    with torch.inference_mode():
        scales.refresh()
    first = shard._kept.codes.data_ptr()
    assert not waits
    assert block_at(first)["stream"] == computing.cuda_stream
    for _ in range(2):  # steps
        assert all(sent(copying) == first for _ in range(2))
        shard.mul_(2)
        scales.refresh()
    assert waits == [(copying, computing)]  # the memory may have had another owner, whose work may not have ended
    assert sent(computing) == first
    assert sent(copying) == first
    assert waits == [(copying, computing), (computing, copying), (copying, computing)]
    shard._kept = None
    assert state_of(first) == "active_pending_free"  # the stream that copies may still read


def test_a_scale_that_was_made_while_copying_outlives_the_gemms(monkeypatch):
    """The allocator keeps freed memory back until the stream that computes has passed, and ranks share a scale."""
    operations, reduce = [], dist.all_reduce
    monkeypatch.setattr(
        dist, "all_reduce", lambda amax, **options: (operations.append(options.get("op")), reduce(amax, **options))
    )
    fake_world(1)
    mesh = dist.init_device_mesh("cuda", (1,))
    shard = Fp8GatherShard(torch.zeros(64, 64, device=DEVICE), GatherScales(linear().wire_format))
    with torch.cuda.stream(torch.cuda.Stream()):
        codes, metadata = shard.fsdp_pre_all_gather(mesh, *NOT_SWITCHED)
    assert operations == [dist.ReduceOp.MAX]
    address = metadata[0].data_ptr()
    shard.fsdp_post_all_gather(codes, metadata, torch.bfloat16)
    assert state_of(address) == "active_allocated"
    del metadata
    assert state_of(address) == "active_pending_free"


def state_of(address):
    return block_at(address).get("state", "free")


def block_at(address):
    segments = torch.cuda.memory_snapshot()
    blocks = ({**block, "stream": segment["stream"]} for segment in segments for block in segment["blocks"])
    return next((block for block in blocks if block["address"] == address), {})


def test_codes_outside_of_compiled_blocks_are_made_by_compiled_kernels():
    """In forward, backward, a second micro-batch and clipping: few kernels of any size, no float32 values in memory."""
    layer = torch.nn.Linear(256, 512, bias=False, device=DEVICE)
    scale_linears(layer, [""], "O2")

    def micro_batch(rows):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            layer(torch.zeros(rows, 256, device=DEVICE, requires_grad=True)).sum().backward()

    for rows in (1024, 1024, 2048):
        micro_batch(rows)
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    graphs = counters["stats"]["unique_graphs"]
    with recording() as log:
        micro_batch(512)
    with recording() as clipping:
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert counters["stats"]["unique_graphs"] == graphs == 7, "one of each function"
    assert len([r for r in log.of("kernel") if r.name.startswith("triton_")]) <= 20
    assert log.count("kernel") <= 32
    assert any("vector_norm" in r.name for r in clipping.of("kernel"))
    assert not [r for r in clipping.of("kernel") if "direct_copy" in r.name], "values were decoded into memory"
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, torch.inf)
    assert counters["stats"]["unique_graphs"] == graphs + 1, "another norm is another function"


def test_emulation_on_a_gpu_without_fp8_compiles_nothing(monkeypatch):
    """Triton has no casts to float8_e4m3fn there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    compiles.cache_clear()
    step, _ = toy_step(L.Fabric(accelerator="cuda", devices=1, plugins=MSAMP("O3", emulate=True)))
    step()
    compiles.cache_clear()
    assert counters["stats"]["unique_graphs"] == 0
