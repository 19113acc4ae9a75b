"""Fabric: what two ranks saved is loaded bit for bit by one, two and four; two go on as if nothing had happened."""

import pytest
import torch

from lightning_lowprec import HalfMixed
from tests.fsdp2.ranks import launch
from tests.fsdp2.toy import Toy, assert_same, everything, setup, train

PRECISIONS = (
    "32-true", "bf16-mixed", "fp8-hybrid-fp16", "fp8-hybrid", "fp8-hybrid-remainder", "bf16-master", "fp8-hybrid-sr",
    "16-mixed", "msamp-o3",
)  # fmt: skip
IN_SHARDS = PRECISIONS[::2]
"""Of these a folder of shards is saved too, and four ranks load them: a scale, remainders, weights without masters."""
WIDENED = ("fp8-hybrid-remainder", "bf16-master")
"""A folder and a file; weights that they have in half precision, and that stay float32 now, become their masters."""
CROSSINGS = (
    ("fp8-hybrid", "bf16-mixed"), ("fp8-hybrid", "bf16-remainder"), ("bf16-mixed", "fp8-hybrid"),
    ("fp8-hybrid-remainder", "fp8-hybrid"), ("fp8-hybrid-remainder", "16-mixed"), ("32-true", "bf16-remainder"),
    ("fp8-hybrid-sr", "32-true"), ("fp8-hybrid-remainder", "bf16-sr"), ("16-mixed", "fp8-hybrid-fp16"),
    *((name, HalfMixed("bf16", master_weights="remainder", keep_fp32=["blocks.0", "head.bias"])) for name in WIDENED),
)  # fmt: skip
SAVED = [*((name, "full") for name in PRECISIONS), *((name, "sharded") for name in IN_SHARDS)]
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def state(fabric, model, optimizer, step=0):
    torch.nn.init.constant_((critic := torch.nn.Linear(1, 1)).bias, step)
    whole = {"precision": fabric.strategy.precision, "critic": critic, "step": step}
    return {"model": model, "optimizer": optimizer, **whole}


def saves_and_goes_on(rank, ranks, folder, saved_in=SAVED, net=Toy, train=train):
    for precision, kind in saved_in:
        name = f"{precision}.{kind}"
        fabric, model, optimizer = setup(precision, ranks, kind=kind, net=net)
        train(fabric, model, optimizer, range(3), ranks)
        fabric.save(folder / f"{name}.ckpt", state(fabric, model, optimizer, 3))
        saved = everything(model, optimizer, fabric.strategy.precision)
        losses = train(fabric, model, optimizer, range(3, 6), ranks)
        after = everything(model, optimizer, fabric.strategy.precision)
        if rank == 0:
            torch.save(saved, folder / f"{name}.truth")
        fabric, model, optimizer = setup(precision, ranks, seed=7, kind=kind, net=net)
        received = state(fabric, model, optimizer)
        assert fabric.load(folder / f"{name}.ckpt", received) == {}
        assert received["step"] == received["critic"].bias == 3
        assert_same(everything(model, optimizer, fabric.strategy.precision), saved, name)
        assert train(fabric, model, optimizer, range(3, 6), ranks) == losses, name
        assert_same(everything(model, optimizer, fabric.strategy.precision), after, name)


def float32_of(held):
    stored, weights = held["optimizer"]["state"], held["model"]
    others = [fqn for fqn in weights if weights[fqn].ndim <= 1 and fqn != "seen"]
    fqns = others + [fqn for fqn in weights if weights[fqn].ndim > 1]  # as `adamw` groups them
    return [stored[i].get("master_param", weights[fqn]).float() for i, fqn in enumerate(fqns)]


def crosses(rank, ranks, folder):
    for source, target in CROSSINGS:
        kind = "sharded" if (source, "sharded") in SAVED else "full"
        fabric, model, optimizer = setup(target, ranks, seed=8, kind=kind)
        fabric.load(folder / f"{source}.{kind}.ckpt", state(fabric, model, optimizer))
        loaded = everything(model, optimizer, fabric.strategy.precision)
        truth = torch.load(folder / f"{source}.{kind}.truth", weights_only=True)
        for value, exact in zip(float32_of(loaded), float32_of(truth), strict=True):
            stochastic = target == "bf16-sr"  # has no master to keep it in
            assert torch.equal(value, exact.to(torch.bfloat16).float() if stochastic else exact), (source, target)
        for i, entry in loaded["optimizer"]["state"].items():
            assert torch.equal(entry["exp_avg"].float(), truth["optimizer"]["state"][i]["exp_avg"].float())
            assert entry["step"] == 3
        if (source, target) == ("16-mixed", "fp8-hybrid-fp16"):
            assert loaded["precision"]["loss_scale"] == truth["precision"]["loss_scale"]
        assert all(loss < 3 for loss in train(fabric, model, optimizer, range(3, 5), ranks)), (source, target)


def loading_is_no_step(rank, ranks, folder):
    """Neither saving nor loading steps, also before the first step; torch's own function for this does."""
    for precision in ("bf16-sr", "bf16-remainder", "fp8-hybrid-fp16"):
        fabric, model, optimizer = setup(precision, ranks)
        steps, plain = [], optimizer.optimizer
        plain.register_step_post_hook(lambda *_: steps.append(1))  # noqa: B023
        before = fabric.strategy.precision.state_dict()
        fabric.save(folder / f"{precision}.no_step.ckpt", state(fabric, model, optimizer))
        plain.param_groups[1]["name"] = "decay"  # which the checkpoint lacks, as it lacks what a new scheduler writes
        fabric.load(folder / f"{precision}.no_step.ckpt", state(fabric, model, optimizer))
        assert (steps, plain.param_groups[1]["name"]) == ([], "decay")
        assert plain.param_groups[0].get("rounding_step", 0) == 0
        assert fabric.strategy.precision.state_dict() == before


def saves_and_loads(rank, ranks, folder):
    saves_and_goes_on(rank, ranks, folder)
    crosses(rank, ranks, folder)
    loading_is_no_step(rank, ranks, folder)


def loads_all(rank, ranks, folder):
    for precision, kind in SAVED:
        if ranks == 1 or precision in IN_SHARDS:
            name = f"{precision}.{kind}"
            fabric, model, optimizer = setup(precision, ranks, seed=5, kind=kind)
            received = state(fabric, model, optimizer)
            assert fabric.load(folder / f"{name}.ckpt", received) == {}
            assert received["step"] == received["critic"].bias == 3
            truth = torch.load(folder / f"{name}.truth", weights_only=True)
            assert_same(everything(model, optimizer, fabric.strategy.precision), truth, name)


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
    launch(saves_and_loads, 2, tmp_path, tmp_path)
    launch(loads_all, 1, tmp_path, tmp_path)
    launch(loads_on_four, 4, tmp_path, tmp_path)
    for precision in PRECISIONS:  # and one process without Lightning reads a full one
        plain = torch.load(tmp_path / f"{precision}.full.ckpt", weights_only=True)
        truth = torch.load(tmp_path / f"{precision}.full.truth", weights_only=True)
        assert_same(dict(plain["model"]), truth["model"], precision)
        assert all(type(t) is torch.Tensor for t in plain["model"].values())
