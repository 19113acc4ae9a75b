"""Bytes per step: the formula against what two ranks count, and against rings played through step by step."""

import itertools
from collections import Counter

import lightning as L
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowprec import FabricFSDP2Strategy, FSDP2Strategy
from lightning_lowprec.tools.demo import ByteGPT
from lightning_lowprec.tools.planning.costs import (
    Weights,
    all_gather,
    all_reduce,
    gathered,
    in_flight,
    step,
    weights_of,
)
from tests.fsdp2.gathers import count_gathers, scales_of
from tests.fsdp2.ranks import run
from tests.toys import QUIET

pytestmark = pytest.mark.slow

PRECISIONS = ("fp8-hybrid", "fp8-rowwise-gw-hp", "bf16-mixed", "32-true")
RESHARD = (None, True, False)
QUIET = {**QUIET, "use_distributed_sampler": False}


def model():
    torch.manual_seed(0)
    return ByteGPT(depth=2, width=32, heads=2, block_size=16)


def batch():
    return tuple(torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(2))


class AllReduces(TorchDispatchMode):
    """Counts the all-reduces that go through torch's dispatcher: those of DTensors, which the scales are."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # the DTensor's own dispatch comes next, and what it calls comes back here
        if "_c10d_functional.all_reduce" in str(func):
            self.bytes[str(args[0].dtype)] += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


class CountedScatter(DefaultReduceScatter):
    """The reduce-scatters of one FSDP2 group: the bytes that this rank put in."""

    def __init__(self):
        self.sent = 0

    def __call__(self, output_tensor, input_tensor, *args, **kwargs):
        self.sent += input_tensor.numel() * input_tensor.element_size()
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class CountScatters(L.Callback):
    def on_train_start(self, trainer, net):
        self.gathers, self.scatters = count_gathers(net), count_scatters(net)


def count_scatters(net):
    scatters = []
    for group in [module for module in net.modules() if isinstance(module, FSDPModule)]:
        scatters.append(CountedScatter())
        group.set_custom_reduce_scatter(scatters[-1])
    return scatters


def counts_of(gathers, scales, scatters):
    return {
        "gathered": {f: g.sent.total() for f, g in gathers.items()},
        "calls": {f: g.calls.total() for f, g in gathers.items()},
        "scattered": sum(scatter.sent for scatter in scatters),
        "scales": dict(scales.bytes),
    }


def by_fabric(precision, **options):
    fabric = L.Fabric(accelerator="cpu", devices=2, precision=precision, strategy=FabricFSDP2Strategy(**options))
    fabric.launch()
    net = model()
    wrapped, optimizer = fabric.setup(net, net.configure_optimizers()["optimizer"])
    gathers, scatters = count_gathers(net), count_scatters(net)
    scales = scales_of(net)
    mode = AllReduces()
    if scales is not None:
        with mode:
            scales.refresh()
    x, y = batch()
    fabric.backward(torch.nn.functional.cross_entropy(wrapped(x).float().flatten(0, 1), y.flatten()))
    optimizer.step()
    assert scales is None or scales.reductions == 1
    return counts_of(gathers, mode, scatters)


def by_trainer(precision, **options):
    net = model()
    counting, strategy = CountScatters(), FSDP2Strategy(**options)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, precision=precision, strategy=strategy, callbacks=counting, max_steps=1, **QUIET
    )
    trainer.fit(net, torch.utils.data.DataLoader([batch()], batch_size=None))
    return counts_of(counting.gathers, AllReduces(), counting.scatters)


def copies():
    """Two copies of one shard each: what goes between them is `torch.distributed.all_reduce`."""
    original, sent = torch.distributed.all_reduce, []

    def counting(tensor, *args, **kwargs):
        sent.append((str(tensor.dtype), tensor.numel() * tensor.element_size()))
        return original(tensor, *args, **kwargs)

    net = model()
    fabric = L.Fabric(accelerator="cpu", devices=2, precision="bf16-mixed", strategy=FabricFSDP2Strategy(replicate=2))
    fabric.launch()
    wrapped, _ = fabric.setup(net, net.configure_optimizers()["optimizer"])
    torch.distributed.all_reduce = counting
    try:
        x, y = batch()
        fabric.backward(torch.nn.functional.cross_entropy(wrapped(x).float().flatten(0, 1), y.flatten()))
    finally:
        torch.distributed.all_reduce = original
    return {"all_reduced": sum(size for _, size in sent), "dtypes": sorted({dtype for dtype, _ in sent})}


def worker(rank):
    seen = {}
    for precision, reshard in itertools.product(PRECISIONS, RESHARD):
        seen[f"fabric {precision} {reshard}"] = by_fabric(precision, reshard_after_forward=reshard)
        seen[f"trainer {precision} {reshard}"] = by_trainer(precision, reshard_after_forward=reshard)
    seen["bf16 reduce"] = by_fabric("bf16-mixed", reduce_dtype=torch.bfloat16)
    seen["copies"] = copies()
    return seen


DEPTH, WIDTH, VOCABULARY = 2, 32, 256
LINEARS = 12 * WIDTH * WIDTH  # qkv 3, proj 1, fc_in 4, fc_out 4
REST = 3 * WIDTH + WIDTH + 4 * WIDTH + WIDTH + 4 * WIDTH  # their biases, and two norms
ROOT_WEIGHTS = Weights(other=2 * VOCABULARY * WIDTH + 2 * WIDTH)  # embedding, head, norm
WIRE = {
    "fp8-hybrid": (Weights(fp8=DEPTH * LINEARS, scales=4 * DEPTH, other=DEPTH * REST), torch.bfloat16),
    "fp8-rowwise-gw-hp": (Weights(other=DEPTH * (LINEARS + REST)), torch.bfloat16),
    "bf16-mixed": (Weights(other=DEPTH * (LINEARS + REST)), torch.bfloat16),
    "32-true": (Weights(other=DEPTH * (LINEARS + REST)), torch.float32),
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("volume"))


@pytest.mark.distributed
@pytest.mark.parametrize("loop", ["fabric", "trainer"])
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("precision", WIRE)
def test_a_step_sends_what_the_formula_says(counted, loop, precision, reshard):
    blocks, dtype = WIRE[precision]
    volume = step(blocks, ROOT_WEIGHTS, shards=2, param_dtype=dtype, reshard_after_forward=reshard)
    for rank in counted:
        seen = rank[f"{loop} {precision} {reshard}"]
        # what a rank puts in is its shard, which a ring passes on n - 1 = 1 time
        assert sum(seen["gathered"].values()) == volume.all_gather_forward + volume.all_gather_backward
        once = sum(size / seen["calls"][fqn] for fqn, size in seen["gathered"].items())
        assert once == volume.all_gather_forward
        # what a rank puts in is the whole gradient, of which a ring sends (n - 1) / n = 1 / 2
        assert seen["scattered"] / 2 == volume.reduce_scatter
        assert volume.all_reduce == 0


@pytest.mark.distributed
def test_scales_gradients_in_bf16_and_copies(counted):
    for rank in counted:
        blocks, dtype = WIRE["fp8-hybrid"]
        volume = step(blocks, ROOT_WEIGHTS, shards=2, param_dtype=dtype)
        # n = 2: a ring all-reduce sends 2 (n - 1) / n = 1 times what is reduced
        assert rank["fabric fp8-hybrid None"]["scales"] == {"torch.float32": 32} == {"torch.float32": volume.scales}
        assert rank["fabric bf16-mixed None"]["scales"] == {}
        blocks, _ = WIRE["bf16-mixed"]
        volume = step(blocks, ROOT_WEIGHTS, shards=2, reduce_dtype=torch.bfloat16)
        assert rank["bf16 reduce"]["scattered"] / 2 == volume.reduce_scatter
        volume = step(blocks, ROOT_WEIGHTS, shards=1, copies=2)
        assert rank["copies"] == {"all_reduced": volume.all_reduce, "dtypes": ["torch.float32"]}
        assert (volume.all_gather_forward, volume.reduce_scatter) == (0, 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_ring_played_through(ranks):
    """Each rank passes on to its right neighbour what it got last; chunks of 6 bytes."""
    size, chunk = 6 * ranks, 6
    holds = [{rank} for rank in range(ranks)]
    sent = 0
    passing = list(range(ranks))
    while any(len(held) < ranks for held in holds):
        sent += chunk  # by every rank
        passing = [passing[(rank - 1) % ranks] for rank in range(ranks)]
        for rank, got in enumerate(passing):
            holds[rank].add(got)
    assert all_gather(size, ranks) == sent
    assert all_reduce(size, ranks) == 2 * sent, "a reduce-scatter, then an all-gather"


def test_frozen_weights_are_gathered_and_have_no_gradients():
    blocks = Weights(fp8=100, other=20, frozen=100)
    volume = step(blocks, Weights(), shards=4, copies=2)
    assert volume.all_gather_forward == volume.all_gather_backward == (100 + 40) * 3 / 4
    assert volume.reduce_scatter == 4 * 20 * 3 / 4
    assert volume.all_reduce == 4 * 20 / 4
    assert volume.total == 105 + 105 + 60 + 20
    assert gathered(blocks, torch.float32) == 180


def test_the_weights_of_groups_with_padding_and_parts():
    model = torch.nn.ModuleDict({"body": torch.nn.ModuleList(torch.nn.Linear(8, 6) for _ in range(2))})
    model["head"] = torch.nn.Linear(6, 5, bias=False).requires_grad_(False)
    model["body"].append(torch.nn.Linear(1, 1, bias=False))
    groups = weights_of(
        model,
        ["body.0"],
        blocks=["body.0", "body.1"],
        shards=4,
        parts=lambda fqn: 2 if fqn == "body.1.weight" else 1,
    )
    assert groups["body.0"] == Weights(fp8=8 * 8, scales=1, other=8), "6 rows in 4 parts of 2"
    assert groups["body.1"] == Weights(other=8 * 8 // 2 + 8)
    assert groups[""] == Weights(other=8 * 6 + 4, frozen=8 * 6)
    tiled = weights_of(model, ["body.0"], blocks=["body.0"], shards=1, tile=4)
    assert tiled["body.0"] == Weights(fp8=8 * 6, scales=2 * 2, other=6), "6 rows and 8 columns of tiles of 4"


def test_what_is_in_flight():
    block, root = Weights(fp8=100, scales=1, other=10), Weights(other=30)
    # root: gathered, and gradients that wait; block: codes and the rest gathered, gradients in bf16 and float32
    assert in_flight(block, root) == 4 * 30 + (100 + 2 * 10) + 6 * 110
    assert in_flight(Weights(), root) == 6 * 30, "the end: gradients in bf16 and float32"
    assert in_flight(Weights(other=10, frozen=10), Weights(other=1), param_dtype=torch.float32) == 8 + 40


def test_one_rank_sends_nothing():
    assert step(Weights(fp8=16, scales=1), Weights(other=16), shards=1).total == 0


@pytest.mark.parametrize("name", ["shards", "copies"])
def test_sizes_are_checked(name):
    with pytest.raises(ValueError, match=rf"`{name}=0` is not valid; expected an integer of at least 1"):
        step(Weights(), Weights(), **{"shards": 2, name: 0})
