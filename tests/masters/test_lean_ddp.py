"""`bf16-8bit` and `bf16-lean` under DDP: weights are updated in the step, with the numbers of one process."""

import logging
from dataclasses import replace

import lightning as L
import pytest
import torch
from lightning.fabric.strategies import DDPStrategy
from torch import distributed as dist
from torch.nn import functional as F

from lightning_lowprec import HalfMixed
from lightning_lowprec.masters.config import LEAN
from tests.fsdp2.ranks import free_port, run
from tests.fsdp2.test_lean_fsdp2 import Net, batch, check_clipping, everything, in_step, setup, sgd, train
from tests.fsdp2.toy import adamw, assert_same

NAMES = ("bf16-8bit", "bf16-lean", "bf16-lean-sr")
pytestmark = pytest.mark.distributed


class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


def on_two(rank):
    said = Said()
    logging.getLogger("lightning.fabric.utilities.rank_zero").addHandler(said)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(said)
    found = {}
    for precision in NAMES:
        fabric, model, optimizer = setup(precision, 2, strategy=DDPStrategy())
        left = train(fabric, model, optimizer, range(4))  # both ranks on the same batches
        found[precision] = everything(model, optimizer), left
    fabric, model, optimizer = setup("bf16-lean", 2, strategy=DDPStrategy())
    train(fabric, model, optimizer, range(4), rank)
    found["halves"] = everything(model, optimizer)
    found["said"] = [line for line in said.lines if "under DDP" in line[1]]
    plugin = HalfMixed("bf16", master_weights=replace(LEAN, clip_tensor=1e-3))
    check_clipping(*setup(plugin, 2, strategy=DDPStrategy(), make=sgd), rank)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(on_two, 2, tmp_path_factory.mktemp("lean"))


def alone(precision, both=False):
    """One process that updates in the step; ``both``: on the batches of both ranks."""
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=in_step(precision))
    model = Net()
    model, optimizer = fabric.setup(model, adamw(model))
    for step in range(4):
        x, y = (torch.cat(parts) for parts in zip(batch(step, 0), batch(step, int(both)), strict=True))
        x, y = (x, y) if both else batch(step)
        fabric.backward(F.cross_entropy(model(x).float(), y))
        optimizer.step()
        optimizer.zero_grad()
    return everything(model, optimizer)


@pytest.mark.parametrize("precision", NAMES)
def test_the_numbers_are_those_of_one_process(ranks, precision):
    expected = alone(precision)
    for rank in ranks:
        found, left = rank[precision]
        assert_same(found, expected, precision)
        assert left == {name for name, _ in Net().named_parameters()}, "DDP averages gradients after their hooks"


def test_one_process_under_ddp_updates_once(monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    try:
        fabric, model, optimizer = setup("bf16-lean", 1, strategy=DDPStrategy())
        train(fabric, model, optimizer, range(4))
        found = everything(model, optimizer)
    finally:
        dist.destroy_process_group()
    assert_same(found, alone("bf16-lean"), "DDP of one process")


def test_halves_of_a_batch(ranks):
    expected = alone("bf16-lean", both=True)["model"]
    start = Net().state_dict()
    for name, value in ranks[0]["halves"]["model"].items():
        moved = (expected[name].float() - start[name]).norm()
        assert (value.float() - expected[name].float()).norm() < 0.1 * moved, name
    assert_same(ranks[0]["halves"], ranks[1]["halves"], "ranks")


def test_the_log_says_what_ddp_costs(ranks):
    first, second = (rank["said"] for rank in ranks)
    assert len(first) == 3, "once per set-up"
    assert all(
        level == "INFO" and "in the step" in line and "2 bytes per parameter more" in line for level, line in first
    )
    assert second == []
