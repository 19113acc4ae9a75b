"""FP8 layers in torch's sequence parallelism and pipelines, on two gloo ranks, against one process."""

import math
from contextlib import contextmanager

import lightning as L
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
from tests.fsdp2.models import Net, batch, loss_of
from tests.fsdp2.ranks import run
from tests.fsdp2.toy import full
from tests.toys import convert

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

RECIPES = ("tensorwise", "rowwise")


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


def by_strategy(recipe):
    plan = sequence_plan(ColwiseParallel, RowwiseParallel)
    strategy = FabricFSDP2Strategy(tensor_parallel=plan, tensor_parallel_size=2, param_dtype=torch.float32)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=FP8TorchAO(recipe))
    fabric.launch()
    net = Net()
    model = fabric.setup_module(net)
    loss = loss_of(model, batch(0, 0))
    fabric.backward(loss)
    return loss.item(), gradients(net)


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


def torchao_gathers_float8():
    """Float8 tensors of torchao 0.13, the oldest one, do not know the operation by which torch gathers."""
    return torch.ops._c10d_functional._wrap_tensor_autograd.default in float8_ops.FLOAT8_OPS_TABLE


def with_float8_activations():
    """torchao's styles, whose all-gathers send activations as float8: with our layers, and with torchao's."""
    if not torchao_gathers_float8():
        return None
    mesh = init_device_mesh("cpu", (2,))

    def cut(model):
        parallelize_module(model, mesh, sequence_plan(Float8ColwiseParallel, Float8RowwiseParallel))

    def refused(prepare=cut, **options):
        try:
            one_step(FP8TorchAO(**options), prepare=prepare)
        except RuntimeError as error:
            return str(error)
        return "not refused"

    def of_torchao(model):
        config = Float8LinearConfig(emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, fqn: fqn != "lm_head")
        return model

    with gloo_takes_float8():
        return {
            "ours": one_step(FP8TorchAO(), prepare=cut),
            "torchao's": one_step(HalfMixed("bf16"), of_torchao(Net()), prepare=cut),
            "rowwise": refused(recipe="rowwise"),
            "evaluation in bf16": refused(lambda model: cut(model.eval()), fp8_eval=False),
        }


X, Y = torch.randn(2, 8, 16, 64, generator=torch.Generator().manual_seed(3))
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B")
BATCHES = 4
"""Micro-batches of X and Y."""


def pipeline(number, schedule):
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "data"))["data"]
    plugin = FP8TorchAO()
    model = parallelize(nn.Sequential(Net().blocks[number]), alone, plugin, param_dtype=torch.float32)
    stage = pipelining.PipelineStage(model, number, 2, torch.device("cpu"))
    runs, losses = schedule(stage, n_microbatches=BATCHES, loss_fn=F.mse_loss), []
    with plugin.forward_context():
        runs.step(*([X] if number == 0 else []), **({"target": Y, "losses": losses} if number else {}))
    return [loss.item() for loss in losses], list(gradients(model).values())


def worker(rank):
    return {
        "sequence": {recipe: by_strategy(recipe) for recipe in RECIPES},
        "float8 activations": with_float8_activations(),
        "pipelines": {schedule: pipeline(rank, getattr(pipelining, schedule)) for schedule in SCHEDULES},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("parallelisms"))


def snr(found, expected):
    assert found.keys() == expected.keys()
    noise = sum((found[name] - expected[name]).float().square().sum() for name in expected)
    return 10 * math.log10(sum(grad.float().square().sum() for grad in expected.values()) / noise)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sequence_parallel_plan(results, recipe):
    """The two roundings of FP8, with other scales, are nearer to each other than FP8 is to float32."""
    loss_of(model := Net(), batch(0, 0)).backward()
    exact, (expected_loss, expected) = gradients(model), one_step(FP8TorchAO(recipe))
    for loss, grads in (rank["sequence"][recipe] for rank in results):
        assert loss == pytest.approx(expected_loss, rel=1e-3)
        assert snr(grads, expected) > max(30, snr(expected, exact))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_of_sharded_stages_computes_the_bits_of_one_process(results, schedule):
    plugin = FP8TorchAO()
    model, losses = convert(plugin, nn.Sequential(*Net().blocks)), []
    for x, y in zip(X.chunk(BATCHES), Y.chunk(BATCHES), strict=True):
        with plugin.forward_context():
            losses.append(F.mse_loss(model(x), y))
        losses[-1].backward()
    assert results[1]["pipelines"][schedule][0] == [loss.item() for loss in losses]
    found = [grad for rank in results for grad in rank["pipelines"][schedule][1]]
    assert all(map(torch.equal, found, [p.grad / BATCHES for p in model.parameters()]))
    assert len(found) == len(list(model.parameters()))


@pytest.fixture
def float8_activations(results):
    if results[0]["float8 activations"] is None:
        pytest.skip("the float8 tensors of this torchao do not know this torch's all-gather")
    return [rank["float8 activations"] for rank in results]


def test_activations_gathered_as_float8_by_torchaos_styles(float8_activations):
    """Our layers compute what torchao's compute, bit for bit."""
    for found in float8_activations:
        (loss, grads), (their_loss, their_grads) = found["ours"], found["torchao's"]
        assert loss == their_loss
        assert grads.keys() == their_grads.keys()
        assert all(torch.equal(grad, their_grads[name]) for name, grad in grads.items())
        assert snr(grads, one_step(FP8TorchAO())[1]) > 30


def test_what_torchaos_styles_cannot_do_raises_with_the_way_out(float8_activations):
    for found in float8_activations:
        assert "the recipe of the layer has a scale per row. Use `FP8TorchAO(recipe='tensorwise')`" in found["rowwise"]
        assert "computes in high precision now. Use `FP8TorchAO(fp8_eval=True)`" in found["evaluation in bf16"]
