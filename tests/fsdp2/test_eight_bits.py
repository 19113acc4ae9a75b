"""8-bit moments under FSDP2."""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from lightning_lowprec import FabricFSDP2Strategy, HalfMixed, MasterConfig
from tests.fsdp2.ranks import launch
from tests.fsdp2.test_resume_fabric import state
from tests.fsdp2.toy import adamw, assert_same, full

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
    """Weights of 4096 numbers and more: one in three dimensions, one of five rows (the last of four ranks has none)."""

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


def batch(step: int, rank: int = 0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, WIDTH, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def setup(precision, ranks, seed=0, kind="sharded", **options):
    precision = PRECISIONS.get(precision, precision)
    words = {"precision": precision} if isinstance(precision, str) else {"plugins": copy.deepcopy(precision)}
    strategy = FabricFSDP2Strategy(state_dict_type=kind, **options)
    fabric = L.Fabric(accelerator="cpu", devices=ranks, strategy=strategy, **words)
    fabric.launch()
    model = Net(seed)
    model, optimizer = fabric.setup(model, adamw(model))
    return fabric, model, optimizer


def train(fabric, model, optimizer, steps, rank=0):
    for step in steps:
        x, y = batch(step, rank)
        fabric.backward(F.cross_entropy(model(x).float(), y))
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    model, optimizer = getattr(model, "module", model), getattr(optimizer, "optimizer", optimizer)
    return {"model": as_bytes(dict(model.state_dict())), "optimizer": as_bytes(optimizer.state_dict())}


SENT_AS = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.int16: torch.float16}


def as_bytes(value):
    """Whole tensors; bits that gloo does not gather in a dtype that it gathers."""
    if isinstance(value, dict):
        return {key: as_bytes(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_bytes(v) for v in value]
    if not isinstance(value, torch.Tensor) or value.dtype not in SENT_AS:
        return full(value)
    if hasattr(value, "to_local"):
        layout = {"shape": value.shape, "stride": value.stride(), "run_check": False}
        local = value.to_local().view(SENT_AS[value.dtype])
        return as_bytes(
            type(value).from_local(local, value.device_mesh, value.placements, **layout).full_tensor().view(value.dtype)
        )
    return value.view(torch.int16 if value.dtype == torch.int16 else torch.uint8).clone()


def on_two(rank, ranks, folder):
    for precision in PRECISIONS:
        as_one_process(rank, ranks, folder, precision)
    for precision, kind in SAVED:
        resumes(rank, ranks, folder, precision, kind)
    into_float32_and_back(rank, ranks, folder)
    with pytest.raises(ValueError, match=r"whose float32 shards take the place of masters\. Use `form='remainder'`"):
        setup(HalfMixed("bf16", master_weights=MasterConfig(moments="8bit")), ranks)


def codes_are_sharded_as_their_weights(model, optimizer):
    held = {name for name, p in model.module.named_parameters() if "exp_avg_codes" in optimizer.state[p]}
    assert held == CODED
    for p in model.module.parameters():
        if "exp_avg_codes" in optimizer.state[p]:
            entry = optimizer.state[p]
            assert entry["exp_avg_codes"].dtype == torch.float8_e4m3fn
            assert entry["exp_avg_codes"].placements == entry["exp_avg_sq_exponents"].placements == p.placements
            row = p.numel() // p.shape[0]
            assert entry["exp_avg_exponents"].shape == (p.shape[0], row // min(256, row & -row))


def resumes(rank, ranks, folder, precision, kind):
    name, path = f"{precision}.{kind}", folder / f"{precision}.{kind}.ckpt"
    fabric, model, optimizer = setup(precision, ranks, kind=kind)
    train(fabric, model, optimizer, range(3), rank)
    fabric.save(path, state(fabric, model, optimizer, 3))
    saved = everything(model, optimizer)
    train(fabric, model, optimizer, range(3, 6))
    after = everything(model, optimizer)
    if rank == 0:
        torch.save(after, folder / f"{name}.after")
    fabric, model, optimizer = setup(precision, ranks, seed=7, kind=kind, cpu_offload=kind == "full")
    fabric.load(path, state(fabric, model, optimizer))
    assert_same(everything(model, optimizer), saved, name)
    train(fabric, model, optimizer, range(3, 6))
    assert_same(everything(model, optimizer), after, name)


def as_one_process(rank, ranks, folder, precision):
    """The ranks train on the same batches, so that the mean of their gradients is the gradient."""
    fabric, model, optimizer = setup(precision, ranks)
    train(fabric, model, optimizer, range(4))
    codes_are_sharded_as_their_weights(model, optimizer)
    found = everything(model, optimizer)
    if rank == 0:
        torch.save(found, folder / f"{precision}.same_batches")


def into_float32_and_back(rank, ranks, folder):
    """Weights, masters and moments stay as they are: the next step is the same."""
    fabric, model, optimizer = setup("bf16-8bit", ranks)
    train(fabric, model, optimizer, range(3), rank)
    for precision in ("fp8-hybrid", "bf16-8bit"):
        path = folder / f"{precision}.crossed.ckpt"
        fabric.save(path, state(fabric, model, optimizer))
        if precision == "fp8-hybrid":
            train(fabric, model, optimizer, [3])
            expected = everything(model, optimizer)
        fabric, model, optimizer = setup(precision, ranks, seed=8)
        fabric.load(path, state(fabric, model, optimizer))
    train(fabric, model, optimizer, [3])
    assert_same(everything(model, optimizer), expected, "float32 and back")


def on_four(rank, ranks, folder):
    """The next three steps, of the same batches on every rank, are those of the two ranks that saved, bit for bit."""
    for precision, kind in SAVED:
        fabric, model, optimizer = setup(precision, ranks, seed=5, kind=kind)
        fabric.load(folder / f"{precision}.{kind}.ckpt", state(fabric, model, optimizer))
        train(fabric, model, optimizer, range(3, 6))
        assert_same(everything(model, optimizer), torch.load(folder / f"{precision}.{kind}.after"), precision)
        tall = dict(model.module.named_parameters())["tall.weight"]
        assert len(tall.to_local()) == (2, 2, 1, 0)[rank]
        assert "exp_avg_codes" in optimizer.state[tall], "also where the rank has no rows"
    fabric, model, optimizer = setup("bf16-8bit", ranks, replicate=2)
    train(fabric, model, optimizer, range(4))
    assert_same(everything(model, optimizer), torch.load(folder / "bf16-8bit.same_batches"), "two copies")
    tensor_parallel(ranks, folder)


def tensor_parallel(ranks, folder):
    """Rows of `down.weight` are cut in two, and so are the exponents of its blocks."""
    options = {"tensor_parallel": {"up": ColwiseParallel(), "down": RowwiseParallel()}, "tensor_parallel_size": 2}
    fabric, model, optimizer = setup("bf16-8bit", ranks, **options)
    train(fabric, model, optimizer, range(3))
    down = dict(model.module.named_parameters())["down.weight"]
    entry = optimizer.state[down]
    assert entry["exp_avg_codes"].to_local().shape == (32, 64)
    assert entry["exp_avg_exponents"].to_local().shape == (32, 1)
    fabric.save(folder / "tensor_parallel.ckpt", state(fabric, model, optimizer))
    saved = everything(model, optimizer)
    fabric, model, optimizer = setup("bf16-8bit", ranks, seed=5, **options)
    fabric.load(folder / "tensor_parallel.ckpt", state(fabric, model, optimizer))
    assert_same(everything(model, optimizer), saved, "tensor parallel")
    with pytest.raises(ValueError, match="Load the checkpoint with the `tensor_parallel_size` that it was saved with"):
        fabric.load(folder / "fp8-hybrid.crossed.ckpt", state(fabric, model, optimizer))


def test_eight_bits(tmp_path):
    launch(on_two, 2, tmp_path, tmp_path)
    launch(on_four, 4, tmp_path, tmp_path)
    for name, precision in PRECISIONS.items():  # without FSDP2
        words = {"precision": precision} if isinstance(precision, str) else {"plugins": precision}
        fabric = L.Fabric(accelerator="cpu", devices=1, **words)
        model = Net()
        model, optimizer = fabric.setup(model, adamw(model))
        train(fabric, model, optimizer, range(4))
        assert_same(everything(model, optimizer), torch.load(tmp_path / f"{name}.same_batches"), name)
