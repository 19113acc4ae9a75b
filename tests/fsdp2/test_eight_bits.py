"""8-bit moments under FSDP2, of weights of 4096 numbers and more."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from lightning_lowprec import HalfMixed, MasterConfig
from lightning_lowprec.callbacks import NumericsMonitor
from tests.fsdp2 import toy
from tests.fsdp2.ranks import launch
from tests.fsdp2.test_resume_fabric import saves_and_goes_on, state
from tests.fsdp2.toy import adamw, assert_same
from tests.toys import stepped

PRECISIONS = {
    "bf16-8bit": "bf16-8bit",
    "fp8-hybrid-8bit": "fp8-hybrid-8bit",
    "stochastic": HalfMixed("bf16", master_weights=MasterConfig(form="stochastic", moments="8bit")),
}
SAVED = (("bf16-8bit", "full"), ("fp8-hybrid-8bit", "sharded"))
CODED = {"up.weight", "down.weight", "experts", "tall.weight"}
WIDTH = 64
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


class Net(nn.Module):
    """One weight in three dimensions, one of five rows (the last of four ranks has none)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(3, 32, WIDTH) / 8)
        self.tall = nn.Linear(1024, 5, bias=False)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(x)))
        x = torch.einsum("nd,efd->nef", x, self.experts.to(x.dtype)).flatten(1)  # (n, 96)
        return self.tall(F.pad(x.repeat(1, 10), (0, 64)))


def setup(precision, ranks, **options):
    return toy.setup(copy.deepcopy(PRECISIONS.get(precision, precision)), ranks, net=Net, **options)


def train(fabric, model, optimizer, steps, ranks=1):
    """On batches of each rank's own, or of one rank the same."""

    def loss(step):
        generator = torch.Generator().manual_seed(10 * step + (fabric.global_rank if ranks > 1 else 0))
        x, y = torch.randn(8, WIDTH, generator=generator), torch.randint(0, 5, (8,), generator=generator)
        return F.cross_entropy(model(x).float(), y)

    return stepped(fabric, optimizer, map(loss, steps))


def everything(fabric, model, optimizer):
    return toy.everything(model, optimizer, fabric.strategy.precision)


def on_two(rank, ranks, folder):
    for precision in PRECISIONS:
        as_one_process(rank, ranks, folder, precision)
    saves_and_goes_on(rank, ranks, folder, SAVED, Net, train)
    into_float32_and_back(rank, ranks, folder)
    with pytest.raises(ValueError, match=r"whose float32 shards take the place of masters\. Use `form='remainder'`"):
        setup(HalfMixed("bf16", master_weights=MasterConfig(moments="8bit")), ranks)


def as_one_process(rank, ranks, folder, precision):
    """The ranks train on the same batches, so that the mean of their gradients is the gradient."""
    fabric, model, optimizer = setup(precision, ranks)
    train(fabric, model, optimizer, range(4))
    assert {name for name, p in model.module.named_parameters() if "exp_avg_codes" in optimizer.state[p]} == CODED
    for p, entry in optimizer.state.items():
        if "exp_avg_codes" in entry:
            assert entry["exp_avg_codes"].dtype == torch.float8_e4m3fn
            assert entry["exp_avg_codes"].placements == entry["exp_avg_sq_exponents"].placements == p.placements
            row = p.numel() // p.shape[0]
            assert entry["exp_avg_exponents"].shape == (p.shape[0], row // min(256, row & -row))
    found = everything(fabric, model, optimizer)
    if rank == 0:
        torch.save(found, folder / f"{precision}.same_batches")


def into_float32_and_back(rank, ranks, folder):
    fabric, model, optimizer = setup("bf16-8bit", ranks)
    train(fabric, model, optimizer, range(3), ranks)
    for precision in ("fp8-hybrid", "bf16-8bit"):
        path = folder / f"{precision}.crossed.ckpt"
        fabric.save(path, state(fabric, model, optimizer))
        if precision == "fp8-hybrid":
            train(fabric, model, optimizer, [3])
            expected = everything(fabric, model, optimizer)
        fabric, model, optimizer = setup(precision, ranks, seed=8)
        fabric.load(path, state(fabric, model, optimizer))
    train(fabric, model, optimizer, [3])
    assert_same(everything(fabric, model, optimizer), expected, "float32 and back")


def on_four(rank, ranks, folder):
    for precision, kind in SAVED:
        fabric, model, optimizer = setup(precision, ranks, seed=5, kind=kind)
        fabric.load(folder / f"{precision}.{kind}.ckpt", state(fabric, model, optimizer))
        assert_same(everything(fabric, model, optimizer), torch.load(folder / f"{precision}.{kind}.truth"), precision)
        tall = dict(model.module.named_parameters())["tall.weight"]
        assert len(tall.to_local()) == (2, 2, 1, 0)[rank]
        assert "exp_avg_codes" in optimizer.state[tall], "also where the rank has no rows"
    copies(rank, ranks, folder)
    tensor_parallel(rank, ranks, folder)


def copies(rank, ranks, folder):
    fabric, model, optimizer = setup("bf16-8bit", ranks, replicate=2)
    assert fabric.strategy.device_mesh.shape == (2, 2, 1)
    assert fabric.strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": rank}
    train(fabric, model, optimizer, range(4))
    assert_same(everything(fabric, model, optimizer), torch.load(folder / "bf16-8bit.same_batches"), "two copies")
    train(fabric, model, optimizer, range(4, 6), ranks)
    mine = everything(fabric, model, optimizer)
    for kind in ("model", "optimizer"):
        assert_same(fabric.broadcast(mine)[kind], mine[kind], "gradients are averaged over the copies")
    fabric, model, optimizer = setup("fp8-hybrid", ranks, replicate=2)
    monitor = NumericsMonitor(every=1, rows=1.0)
    monitor.step(model, 0)
    train(fabric, model, optimizer, range(1))
    assert min(reading.output_db for reading in monitor.finish()) > 20, "of the rows that lie on this rank"


def tensor_parallel(rank, ranks, folder):
    """Rows of `down.weight` are cut in two, and so are the exponents of its blocks."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    cut = lambda model, mesh: parallelize_module(model, mesh, plan)  # noqa: E731
    options = {"tensor_parallel": cut, "tensor_parallel_size": 2}
    fabric, model, optimizer = setup("bf16-8bit", ranks, **options)
    assert fabric.strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank // 2}
    train(fabric, model, optimizer, range(3))
    entry = optimizer.state[dict(model.module.named_parameters())["down.weight"]]
    assert entry["exp_avg_codes"].to_local().shape == (32, 64)
    assert entry["exp_avg_exponents"].to_local().shape == (32, 1)
    fabric.save(folder / "tensor_parallel.ckpt", state(fabric, model, optimizer))
    saved = everything(fabric, model, optimizer)
    fabric, model, optimizer = setup("bf16-8bit", ranks, seed=5, **options)
    fabric.load(folder / "tensor_parallel.ckpt", state(fabric, model, optimizer))
    assert_same(everything(fabric, model, optimizer), saved, "tensor parallel")
    with pytest.raises(ValueError, match="Load the checkpoint with the `tensor_parallel_size` that it was saved with"):
        fabric.load(folder / "fp8-hybrid.crossed.ckpt", state(fabric, model, optimizer))


def test_eight_bits(tmp_path):
    launch(on_two, 2, tmp_path, tmp_path)
    launch(on_four, 4, tmp_path, tmp_path)
    for name, precision in PRECISIONS.items():  # without FSDP2
        fabric, model = toy.fabric_for(precision), Net()
        model, optimizer = fabric.setup(model, adamw(model))
        train(fabric, model, optimizer, range(4))
        assert_same(everything(fabric, model, optimizer), torch.load(tmp_path / f"{name}.same_batches"), name)
