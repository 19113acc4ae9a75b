"""FP8 layers in torch's sequence parallelism and pipelines, on two gloo ranks, against one process."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, float8_ops
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO, HalfMixed, parallelize
from lightning_lowprec.callbacks import NumericsMonitor
from tests.fsdp2.models import Net, batch, loss_of
from tests.fsdp2.ranks import parts, run
from tests.fsdp2.toy import fabric_for, full
from tests.toys import convert

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def gradients(model):
    return full({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def one_step(plugin, model=None, prepare=lambda model: None):
    model = convert(plugin, Net() if model is None else model)
    prepare(model)
    with plugin.forward_context():
        loss = loss_of(model, batch(0, 0))
    loss.backward()
    return loss.item(), gradients(model)


def sequence_plan(colwise, rowwise):
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(2):
        plan |= {
            f"blocks.{i}.norm": SequenceParallel(),
            f"blocks.{i}.up": colwise(input_layouts=Shard(1)),
            f"blocks.{i}.down": rowwise(output_layouts=Shard(1)),
        }
    return plan


def snr(found, expected):
    assert found.keys() == expected.keys()
    noise = sum((found[name] - expected[name]).float().square().sum() for name in expected)
    return 10 * math.log10(sum(grad.float().square().sum() for grad in expected.values()) / noise)


def a_sequence_parallel_plan(rank, recipe):
    """The two roundings of FP8, with other scales, are nearer to each other than FP8 is to float32."""
    scale, base = (4.0, {"base": "fp16", "loss_scale": 4.0}) if recipe == "tensorwise" else (1.0, {})
    plan = sequence_plan(ColwiseParallel, RowwiseParallel)
    strategy = FabricFSDP2Strategy(tensor_parallel=plan, tensor_parallel_size=2, param_dtype=torch.float32)
    fabric = fabric_for(FP8TorchAO(recipe, **base), 2, strategy=strategy)
    model = fabric.setup_module(net := Net())
    monitor = NumericsMonitor(every=1)
    monitor.step(model, 0)
    loss = loss_of(model, batch(0, 0))
    fabric.backward(loss)
    assert (monitor.finish(), {*monitor.missing.values()}) == ([], {"tensor parallelism cuts the weight"})
    grads = {name: grad / scale for name, grad in gradients(net).items()}
    loss_of(in_float32 := Net(), batch(0, 0)).backward()
    exact, (expected_loss, expected) = gradients(in_float32), one_step(FP8TorchAO(recipe))
    assert loss.item() == pytest.approx(expected_loss, rel=1e-3)
    assert snr(grads, expected) > max(30, snr(expected, exact))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=1.0))
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm(1).item()
    clipped = fabric.clip_gradients(model, optimizer, max_norm=norm / 2, norm_type=1)
    assert clipped.item() == pytest.approx(norm, rel=1e-4)
    assert all(torch.allclose(grad, grads[name] / 2, rtol=1e-3) for name, grad in gradients(net).items())
    net.lm_head.weight.grad.mul_(math.inf)
    with pytest.raises(RuntimeError, match=r"order 1 .* not finite.*`error_if_nonfinite=False`"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1)


@contextmanager
def gloo_takes_float8():
    table = dict(float8_ops.FLOAT8_OPS_TABLE)

    def as_bytes(handler):
        def handle(op, args, kwargs=None):
            return handler(lambda codes, *rest: op(codes.view(torch.uint8), *rest).view(codes.dtype), args, kwargs)

        return handle

    collectives = [op for op in table if "c10d_functional" in str(op)]
    float8_ops.FLOAT8_OPS_TABLE.update({op: as_bytes(table[op]) for op in collectives})
    try:
        yield
    finally:
        float8_ops.FLOAT8_OPS_TABLE.update(table)


def activations_gathered_as_float8_by_torchaos_styles(rank):
    """Our layers compute what torchao's compute, bit for bit; what they cannot do raises with the way out."""
    mesh = init_device_mesh("cpu", (2,))

    def cut(model):
        parallelize_module(model, mesh, sequence_plan(Float8ColwiseParallel, Float8RowwiseParallel))

    theirs, config = Net(), Float8LinearConfig(emulate=True)
    convert_to_float8_training(theirs, config=config, module_filter_fn=lambda module, fqn: fqn != "lm_head")
    with gloo_takes_float8():
        loss, grads = one_step(FP8TorchAO(), prepare=cut)
        their_loss, their_grads = one_step(HalfMixed("bf16"), theirs, prepare=cut)
        message = r"the recipe of the layer has a scale per row. Use `FP8TorchAO\(recipe='tensorwise'\)`"
        with pytest.raises(RuntimeError, match=message):
            one_step(FP8TorchAO("rowwise"), prepare=cut)
        with pytest.raises(RuntimeError, match=r"computes in high precision now. Use `FP8TorchAO\(fp8_eval=True\)`"):
            one_step(FP8TorchAO(fp8_eval=False), prepare=lambda model: cut(model.eval()))
    assert loss == their_loss
    assert grads.keys() == their_grads.keys()
    assert all(torch.equal(grad, their_grads[name]) for name, grad in grads.items())
    assert snr(grads, one_step(FP8TorchAO())[1]) > 30


X, Y = torch.randn(2, 8, 16, 64, generator=torch.Generator().manual_seed(3))
BATCHES = 4


def a_pipeline_of_sharded_stages_computes_the_bits_of_one_process(rank, schedule):
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "data"))["data"]
    plugin = FP8TorchAO()
    model = parallelize(nn.Sequential(Net().blocks[rank]), alone, plugin, param_dtype=torch.float32)
    stage = pipelining.PipelineStage(model, rank, 2, torch.device("cpu"))
    runs, losses = getattr(pipelining, schedule)(stage, n_microbatches=BATCHES, loss_fn=F.mse_loss), []
    with plugin.forward_context():
        runs.step(*([X] if rank == 0 else []), **({"target": Y, "losses": losses} if rank else {}))
    whole, expected = convert(plugin := FP8TorchAO(), nn.Sequential(*Net().blocks)), []
    for x, y in zip(X.chunk(BATCHES), Y.chunk(BATCHES), strict=True):
        with plugin.forward_context():
            expected.append(F.mse_loss(whole(x), y))
        expected[-1].backward()
    assert rank == 0 or [loss.item() for loss in losses] == [loss.item() for loss in expected]
    for grad, p in zip(gradients(model).values(), whole[rank].parameters(), strict=True):
        assert torch.equal(grad, p.grad / BATCHES)


PARTS = [
    *((a_sequence_parallel_plan, recipe) for recipe in ("tensorwise", "rowwise")),
    *((a_pipeline_of_sharded_stages_computes_the_bits_of_one_process, f"Schedule{name}") for name in ("GPipe", "1F1B")),
]
if torch.ops._c10d_functional._wrap_tensor_autograd.default in float8_ops.FLOAT8_OPS_TABLE:  # unknown to torchao 0.13
    PARTS.append((activations_gathered_as_float8_by_torchaos_styles,))


@parts(*PARTS)
def test_two_ranks(part, tmp_path):
    run(part[0], 2, tmp_path, *part[1:])
