"""`bf16-lean`, `bf16-lean-sr` and `fp8-lean` under FSDP2: updates during the backward pass, codes in checkpoints."""

from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_lowprec import FP8TorchAO, HalfMixed
from lightning_lowprec.masters.config import LEAN, LEAN_SR
from tests.fsdp2.test_resume_fabric import state
from tests.fsdp2.toy import adamw, assert_same, full
from tests.fsdp2.worlds import run

LEANS = ("bf16-lean", "bf16-lean-sr", "fp8-lean")
KINDS = ("sharded", "full")
CODED = {"up.weight", "down.weight", "experts", "tall.weight"}
WIDTH = 64
pytestmark = pytest.mark.distributed


class Net(L.LightningModule):
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


def setup(precision, ranks, seed=0, kind="sharded", strategy=None, **options):
    from lightning_lowprec.fsdp2.fabric import FabricFSDP2Strategy

    words = {"precision": precision} if isinstance(precision, str) else {"plugins": precision}
    strategy = strategy or FabricFSDP2Strategy(state_dict_type=kind, **options)
    fabric = L.Fabric(accelerator="cpu", devices=ranks, strategy=strategy, **words)
    fabric.launch()
    model = Net(seed)
    model, optimizer = fabric.setup(model, adamw(model))
    return fabric, model, optimizer


def train(fabric, model, optimizer, steps, rank=0):
    """Train on the batches of ``rank``; return the names of the parameters that had gradients before the step."""
    left = set()
    for step in steps:
        x, y = batch(step, rank)
        fabric.backward(F.cross_entropy(model(x).float(), y))
        left |= {name for name, p in model.module.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return left


def in_step(precision, **options):
    """The plugin of a precision, with updates in the step."""
    config = replace(LEAN_SR if precision.endswith("sr") else LEAN, update="step", **options)
    if precision == "fp8-lean":
        return FP8TorchAO(master_weights=config, weight_codes="per_gemm")
    return HalfMixed("bf16", master_weights=config)


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


# ---- in two processes


def on_two(rank, ranks, folder):
    for precision in LEANS:
        as_in_the_step(rank, ranks, precision)
        for kind in KINDS:
            resumes(rank, ranks, folder, precision, kind)


def as_in_the_step(rank, ranks, precision):
    fabric, model, optimizer = setup(precision, ranks)
    assert train(fabric, model, optimizer, range(4), rank) == set(), precision
    found = everything(model, optimizer)
    held = {name for name, p in model.module.named_parameters() if "exp_avg_codes" in optimizer.state[p]}
    assert held == CODED
    for p in model.module.parameters():
        if "exp_avg_codes" in optimizer.state[p]:
            entry = optimizer.state[p]
            assert entry["exp_avg_codes"].dtype == torch.float8_e4m3fn
            assert entry["exp_avg_codes"].placements == entry["exp_avg_sq_exponents"].placements == p.placements
            row = p.numel() // p.shape[0]
            assert entry["exp_avg_exponents"].shape == (p.shape[0], row // min(256, row & -row))
    fabric, model, optimizer = setup(in_step(precision), ranks)
    assert train(fabric, model, optimizer, range(4), rank) == {n for n, _ in model.module.named_parameters()}
    assert_same(everything(model, optimizer), found, f"{precision}: backward and step")


def resumes(rank, ranks, folder, precision, kind):
    name, path = f"{precision}.{kind}", folder / f"{precision}.{kind}.ckpt"
    fabric, model, optimizer = setup(precision, ranks, kind=kind)
    train(fabric, model, optimizer, range(3), rank)
    fabric.save(path, state(fabric, model, optimizer, 3))
    saved = everything(model, optimizer)
    train(fabric, model, optimizer, range(3, 6), rank)
    after = everything(model, optimizer)
    if rank == 0:
        torch.save(saved, folder / f"{name}.truth")
    fabric, model, optimizer = setup(precision, ranks, seed=7, kind=kind)
    fabric.load(path, state(fabric, model, optimizer))
    assert_same(everything(model, optimizer), saved, name)
    train(fabric, model, optimizer, range(3, 6), rank)
    assert_same(everything(model, optimizer), after, name)


def test_leans(tmp_path):
    run(on_two, 2, tmp_path, tmp_path)
