"""Gradients reduced in float8 on four gloo ranks: bytes, bounds of the rounding, NaN and inf, every kind of mesh."""

import math

import lightning as L
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_lowprec.fsdp2.traffic import Fp8ReduceScatter
from tests.fsdp2.models import Block, batch, full, loss_of
from tests.fsdp2.ranks import run
from tests.fsdp2.test_pipelines import pipeline, pipeline_of_one
from tests.toys import QUIET, Task

pytestmark = pytest.mark.distributed
RANKS = 4
STEPS = 3


class Odd(nn.Module):
    """Rows that do not divide, a tied head, frozen weights, and biases that share blocks of 128 with weights."""

    def __init__(self, rows: int = 33):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(rows, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].up.weight.requires_grad_(False)
        self.odd = nn.Linear(64, 7)
        self.back = nn.Linear(7, 64, bias=False)
        self.lm_head = nn.Linear(64, rows, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x + self.back(self.odd(x)))


def local_gradients(data_ranks, steps=(0,)):
    """The gradients of every rank's batches, by name; on one process, in float32."""
    model, found = Odd(), []
    for rank in range(data_ranks):
        model.zero_grad()
        for step in steps:
            loss_of(model, batch(step, rank)).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


def sgd(module):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)


class Wire:
    """The bytes that this rank sends to others, by collective: rings for reductions, all but its own part else."""

    def __init__(self):
        self.sent = {}

    def __enter__(self):
        self.originals = {name: getattr(dist, name) for name in ("all_to_all_single", "all_reduce")}
        for name, original in self.originals.items():
            setattr(dist, name, self.counting(name, original))
        return self

    def counting(self, name, original):
        def counted(tensor, *args, group=None, **kwargs):
            ranks = dist.get_world_size(group)
            times = 2 if name == "all_reduce" else 1
            size = times * tensor.numel() * tensor.element_size() * (ranks - 1) // ranks
            self.sent[name, str(tensor.dtype)] = self.sent.get((name, str(tensor.dtype)), 0) + size
            return original(tensor, *args, group=group, **kwargs)

        return counted

    def __exit__(self, *error):
        for name, original in self.originals.items():
            setattr(dist, name, original)


def fabric_for(precision="32-true", **options):
    from lightning_lowprec import FabricFSDP2Strategy

    strategy = FabricFSDP2Strategy(**{"fp8_reduce": True, **options})
    fabric = L.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def gradients(data_rank, prepare=lambda net: None, steps=(0,), **options):
    """The gathered gradients of one step, and what was sent for them."""
    from lightning_lowprec.fsdp2 import strategy as sharding

    fabric = fabric_for(**options)
    net = Odd()
    model = fabric.setup_module(net)
    prepare(net)
    for step in steps:
        with Wire() as wire, fabric.no_backward_sync(model, enabled=step != steps[-1]):
            fabric.backward(loss_of(model, batch(step, data_rank)))
    traffic = sharding._sharded[net].sharded.traffic
    reductions = list(traffic.reductions.values())
    return {
        "gradients": {name: p.grad.full_tensor() for name, p in net.named_parameters() if p.grad is not None},
        "local": [p.grad.to_local() for p in net.parameters() if p.grad is not None],
        "dtypes": {str(p.grad.dtype) for p in net.parameters() if p.grad is not None},
        "wire": wire.sent,
        "sent": sum(r.sent for r in reductions),
        "values": sum(r.values for r in reductions),
        "calls": sum(r.calls for r in reductions),
        "line": traffic.report(),
    }


def colwise_rowwise(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model.blocks[0], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def divided_by(factor):
    def prepare(net):
        for module in net.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(factor)

    return prepare


def trained(rank, precision, optimizer_class, **options):
    fabric = fabric_for(precision, **options)
    net = Odd(rows=32)
    model, optimizer = fabric.setup(net, optimizer_class([p for p in net.parameters() if p.requires_grad], lr=0.01))
    for step in range(STEPS):
        fabric.backward(loss_of(model, batch(step, rank)))
        optimizer.step()
        optimizer.zero_grad()
    return full(net)


def lost_step(rank, lost, **options):
    """fp16 with loss scaling: one rank's gradient of one weight has a NaN or an inf; the weights before and after."""
    fabric = fabric_for("16-mixed", **options)
    net = Odd()
    model, optimizer = fabric.setup(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
    before = full(net)
    loss = loss_of(model, batch(0, rank))
    if rank == 3:
        net.back.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([17]), lost))
    fabric.backward(loss)
    found = {
        name: p.grad.full_tensor().isfinite().all().item() for name, p in net.named_parameters() if p.requires_grad
    }
    optimizer.step()
    return found, all(torch.equal(w, full(net)[name]) for name, w in before.items())


def by_trainer(rank):
    from lightning_lowprec import FSDP2Strategy

    module = Task(Odd(rows=32), loss_of, sgd)
    trainer = L.Trainer(
        accelerator="cpu", devices=RANKS, strategy=FSDP2Strategy(fp8_reduce=True), precision="32-true",
        max_steps=STEPS, use_distributed_sampler=False, **QUIET,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader([batch(step, rank) for step in range(STEPS)], batch_size=None))
    return full(module.net)


def stages_by_data():
    """Two stages of a pipeline, each sharded over two ranks; the gradients of this rank's stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "data"))
    number, data_rank = mesh.get_coordinate()
    group = mesh["stages"].get_group()
    options = {"fp8_reduce": True, "param_dtype": torch.float32}
    return pipeline(number, "bf16", "Schedule1F1B", mesh["data"], group=group, data_rank=data_rank, **options)[1]


def worker(rank):
    tensor = {"tensor_parallel": colwise_rowwise, "tensor_parallel_size": 2}
    ways = {
        "shards": gradients(rank),
        "copies": gradients(rank, replicate=2),
        "copies only": gradients(rank, replicate=4),
        "tensor parallel": gradients(rank // 2, **tensor),
        "bf16 buffers": gradients(rank, reduce_dtype=torch.bfloat16),
        "two batches, copies": gradients(rank, steps=(0, 1), replicate=2),
        "divided by 2": gradients(rank, prepare=divided_by(2.0)),
        "divided by 2, copies": gradients(rank, prepare=divided_by(2.0), replicate=2),
    }
    sgd = torch.optim.SGD
    trainings = {
        name: (trained(rank, name, optimizer), trained(rank, name, optimizer, fp8_reduce=False))
        for name, optimizer in (("fp8-hybrid", sgd), ("msamp-o3", sgd), ("bf16-lean", torch.optim.AdamW))
    }
    lost = {"nan": lost_step(rank, torch.nan), "inf with copies": lost_step(rank, torch.inf, replicate=2)}
    by_fabric = trained(rank, "32-true", sgd)
    return {
        "pipeline": stages_by_data(),
        "ways": ways,
        "trainings": trainings,
        "lost": lost,
        "trainer and fabric": (by_trainer(rank), by_fabric),
    }


GROUPS = {"blocks.0": "blocks.0", "blocks.1": "blocks.1"}  # everything else is the root's


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, RANKS, tmp_path_factory.mktemp("fp8_reduce"))


def group_of(name):
    return GROUPS.get(".".join(name.split(".")[:2]), "")


def rounding(values, largest):
    """Half a step of float8_e4m3fn with scale 448 / amax: relative, or of the numbers near zero."""
    return values.abs() * 2.0**-4 + largest / 448 * 2.0**-10


def bounds(gradients):
    """By name: the mean over ranks, and how far from it a reduction may be that rounds each rank's values once."""
    names = gradients[0]
    largest = [
        {name: max(g[other].abs().max() for other in names if group_of(other) == group_of(name)) for name in names}
        for g in gradients
    ]
    means = {name: torch.stack([g[name] for g in gradients]).double().mean(0) for name in names}
    moved = {
        name: sum(rounding(g[name].double(), top[name]) for g, top in zip(gradients, largest, strict=True))
        / len(gradients)
        for name in names
    }
    return means, moved


def in_bounds(found, gradients, second=False):
    means, moved = bounds(gradients)
    assert found.keys() == means.keys()
    for name, mean in means.items():
        most = moved[name] * (1 + 1e-3) + 1e-6 * mean.abs().max()
        if second:  # the mean is rounded once more
            top = max(m.abs().max() for other, m in means.items() if group_of(other) == group_of(name))
            most = most + rounding(mean.abs() + most, top * 1.1)
        error = (found[name].double() - mean).abs()
        assert (error <= most).all(), name
        assert error.max() > 1e-4 * mean.abs().max(), f"{name} was not rounded"


def test_shards_have_the_mean_rounded_once_per_rank(results):
    for rank in results:
        in_bounds(rank["ways"]["shards"]["gradients"], local_gradients(4))
        assert rank["ways"]["shards"]["dtypes"] == {"torch.float32"}


def test_tensor_parallel_ranks_reduce_over_their_data_ranks(results):
    for rank in results:
        in_bounds(rank["ways"]["tensor parallel"]["gradients"], local_gradients(2))


@pytest.mark.parametrize("way", ["copies", "copies only"])
def test_copies_have_the_same_bits(results, way):
    """Within a copy sums are float32, so the sums of a copy are rounded, and then the mean."""
    locals_ = local_gradients(4)
    if way == "copies":  # a copy is two neighbouring ranks
        locals_ = [{k: (a[k] + b[k]) / 2 for k in a} for a, b in (locals_[:2], locals_[2:])]
    for rank in results:
        in_bounds(rank["ways"][way]["gradients"], locals_, second=True)
    shards = 2 if way == "copies" else 1
    for one, other in ((0, shards), (shards - 1, 2 * shards - 1)):
        pairs = zip(results[one]["ways"][way]["local"], results[other]["ways"][way]["local"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("way", "ranks"), [("shards", 4), ("tensor parallel", 2)])
def test_the_bytes_of_a_reduce_scatter(results, way, ranks):
    """1.03 (N - 1) / N bytes per trained parameter, where float32 has 4; rows that do not divide are padded."""
    for rank in results:
        seen = rank["ways"][way]
        assert seen["calls"] == 3, "two blocks and the root"
        assert seen["wire"] == {("all_to_all_single", "torch.uint8"): seen["sent"]}
        assert 1.031 <= seen["sent"] / seen["values"] <= 1.031 + 3 * 20 * (ranks - 1) / seen["values"]
        own = sum(p.numel() for p in Odd().parameters() if p.requires_grad)
        if way == "shards":
            padding = 3 * 64 + 64 + 1  # 33 rows are cut as 36; 7 rows, and 7 numbers, as 8
            assert seen["values"] == (own + padding) * 3 // 4


def test_the_bytes_between_copies(results):
    """2 x 1.03 (c - 1) / c bytes per parameter of a shard; within a copy FSDP2 reduces in float32."""
    for rank in results:
        seen = rank["ways"]["copies"]
        assert not [kind for kind in seen["wire"] if kind[0] == "all_reduce"]
        assert 1.03 < seen["sent"] / seen["values"] < 1.05
        assert seen["wire"]["all_to_all_single", "torch.uint8"] == seen["sent"] / 2, "the other half is gathered"
        assert "all-reduce between copies: float8" in seen["line"]
        assert "0.26x of float32" in seen["line"]
    assert "reduce-scatter: float8, " in results[0]["ways"]["shards"]["line"]


def test_micro_batches_without_communication_are_reduced_once(results):
    for rank in results:
        assert rank["ways"]["two batches, copies"]["calls"] == 3
        locals_ = local_gradients(4, steps=(0, 1))
        pairs = [{k: (a[k] + b[k]) / 2 for k in a} for a, b in (locals_[:2], locals_[2:])]
        in_bounds(rank["ways"]["two batches, copies"]["gradients"], pairs, second=True)


@pytest.mark.parametrize("mesh", ["", ", copies"])
def test_a_divide_factor_of_the_user_counts(results, mesh):
    """Divided by 2, not by 4: twice the mean, with the same bits because 2 is a power of two."""
    for rank in results:
        mean = rank["ways"]["copies" if mesh else "shards"]["gradients"]
        for name, found in rank["ways"][f"divided by 2{mesh}"]["gradients"].items():
            torch.testing.assert_close(found, 2 * mean[name], rtol=0, atol=0)


def test_the_buffers_may_be_bfloat16(results):
    """Values are rounded to bfloat16 before and after: 2**-8 each."""
    for rank in results:
        means, moved = bounds(local_gradients(4))
        for name, found in rank["ways"]["bf16 buffers"]["gradients"].items():
            most = moved[name] * 1.02 + 2.0**-7 * means[name].abs().max()
            assert ((found.double() - means[name]).abs() <= most).all(), name


@pytest.mark.parametrize("way", ["nan", "inf with copies"])
def test_a_lost_number_of_one_rank_skips_the_step_on_all(results, way):
    for rank in results:
        finite, unchanged = rank["lost"][way]
        assert not finite["back.weight"]
        assert finite["blocks.0.up.weight"], "another group"
        assert unchanged


@pytest.mark.parametrize("precision", ["fp8-hybrid", "msamp-o3", "bf16-lean"])
def test_trainings_follow_those_that_reduce_in_float32(results, precision):
    start = Odd(rows=32).state_dict()
    for rank in results:
        ours, reference = rank["trainings"][precision]
        moved = math.sqrt(sum((reference[k].float() - start[k]).square().sum() for k in start))
        apart = math.sqrt(sum((reference[k].float() - ours[k].float()).square().sum() for k in start))
        assert 0 < apart < {"fp8-hybrid": 0.1, "msamp-o3": 0.2, "bf16-lean": 0.3}[precision] * moved
        for name, weight in results[0]["trainings"][precision][0].items():
            assert torch.equal(weight, ours[name])


def test_the_trainer_trains_as_fabric_does(results):
    for rank in results:
        by_trainer, by_fabric = rank["trainer and fabric"]
        assert all(torch.equal(w, by_fabric[name]) for name, w in by_trainer.items())


def test_stages_of_a_pipeline_reduce_over_their_data_ranks(results):
    one, other = (pipeline_of_one("bf16", data_rank=rank)[1] for rank in range(2))
    names = set()
    for rank in results:
        names |= rank["pipeline"].keys()
        for name, found in rank["pipeline"].items():
            mean = (one[name] + other[name]) / 2
            noise = (found - mean).square().sum() / mean.square().sum()
            assert 10 * torch.log10(noise) < -28, name
    assert names == one.keys()


def test_other_reductions_raise():
    class Alone:
        def size(self):
            return 1

    x = torch.ones(4)
    with pytest.raises(ValueError, match=r"got the reduction .*MAX; expected SUM, AVG or PREMUL_SUM"):
        Fp8ReduceScatter()(x, x, Alone(), torch.distributed.ReduceOp(torch.distributed.ReduceOp.MAX))
    with pytest.raises(ValueError, match="Use `fp8_reduce=False`"):
        Fp8ReduceScatter()(x, x, Alone(), torch.distributed.ReduceOp.SUM, async_op=True)
