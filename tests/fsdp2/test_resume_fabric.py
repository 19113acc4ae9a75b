"""Fabric: what two ranks saved is loaded bit for bit by one, two and four; two go on as if nothing had happened."""

import pytest
import torch

from tests.fsdp2.ranks import launch
from tests.fsdp2.toy import assert_same, everything, setup, train

PRECISIONS = (
    "32-true", "bf16-mixed", "fp8-hybrid-fp16", "fp8-hybrid", "fp8-hybrid-remainder", "bf16-master", "fp8-hybrid-sr",
    "16-mixed",
)  # fmt: skip
IN_SHARDS = PRECISIONS[::2]
"""Of these a folder of shards is saved too, and four ranks load them: a scale, remainders, weights without masters."""
SAVED = [*((name, "full") for name in PRECISIONS), *((name, "sharded") for name in IN_SHARDS)]
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def state(fabric, model, optimizer, step=0):
    return {"model": model, "optimizer": optimizer, "precision": fabric.strategy.precision, "step": step}


def saves_and_goes_on(rank, ranks, folder):
    for precision, kind in SAVED:
        name = f"{precision}.{kind}"
        fabric, model, optimizer = setup(precision, ranks, kind=kind)
        train(fabric, model, optimizer, range(3), ranks)
        fabric.save(folder / f"{name}.ckpt", state(fabric, model, optimizer, 3))
        saved = everything(model, optimizer, fabric.strategy.precision)
        losses = train(fabric, model, optimizer, range(3, 6), ranks)
        after = everything(model, optimizer, fabric.strategy.precision)
        if rank == 0:
            torch.save(saved, folder / f"{name}.truth")
        fabric, model, optimizer = setup(precision, ranks, seed=7, kind=kind)
        received = state(fabric, model, optimizer)
        assert fabric.load(folder / f"{name}.ckpt", received) == {}
        assert received["step"] == 3
        assert_same(everything(model, optimizer, fabric.strategy.precision), saved, name)
        assert train(fabric, model, optimizer, range(3, 6), ranks) == losses, name
        assert_same(everything(model, optimizer, fabric.strategy.precision), after, name)


def loads(rank, ranks, folder, precision, kind):
    name = f"{precision}.{kind}"
    fabric, model, optimizer = setup(precision, ranks, seed=5, kind=kind)
    received = state(fabric, model, optimizer)
    rest = fabric.load(folder / f"{name}.ckpt", received)
    assert rest == {}
    assert received["step"] == 3
    truth = torch.load(folder / f"{name}.truth", weights_only=True)
    loaded = everything(model, optimizer, fabric.strategy.precision)
    assert_same(loaded, truth, name)


def loads_all(rank, ranks, folder):
    for precision, kind in SAVED:
        if ranks == 1 or precision in IN_SHARDS:
            loads(rank, ranks, folder, precision, kind)


def loads_on_four(rank, ranks, folder):
    loads_all(rank, ranks, folder)
    for options in ({"replicate": 2}, {"cpu_offload": True}):
        path = folder / f"{next(iter(options))}.ckpt"
        fabric, model, optimizer = setup("fp8-hybrid", ranks, **options)
        train(fabric, model, optimizer, range(3), ranks)
        fabric.save(path, state(fabric, model, optimizer))
        saved = everything(model, optimizer, fabric.strategy.precision)
        for target in (options, {}):
            fabric, model, optimizer = setup("fp8-hybrid", ranks, seed=5, **target)
            fabric.load(path, state(fabric, model, optimizer))
            assert_same(everything(model, optimizer, fabric.strategy.precision), saved, f"{options} to {target}")


def test_what_two_ranks_saved(tmp_path):
    launch(saves_and_goes_on, 2, tmp_path, tmp_path)
    launch(loads_all, 1, tmp_path, tmp_path)
    launch(loads_on_four, 4, tmp_path, tmp_path)
    for precision in PRECISIONS:  # and one process without Lightning reads a full one
        plain = torch.load(tmp_path / f"{precision}.full.ckpt", weights_only=True)
        truth = torch.load(tmp_path / f"{precision}.full.truth", weights_only=True)
        assert_same(dict(plain["model"]), truth["model"], precision)
        assert all(type(t) is torch.Tensor for t in plain["model"].values())
