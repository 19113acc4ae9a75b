"""A checkpoint of one precision under another: weights always, float32 masters wherever either side has them."""

import warnings

import pytest
import torch

from tests.fsdp2.ranks import launch
from tests.fsdp2.test_resume_fabric import state
from tests.fsdp2.toy import everything, full, setup, train

CROSSINGS = (
    ("fp8-hybrid", "bf16-mixed", "sharded"), ("bf16-mixed", "fp8-hybrid", "full"),
    ("bf16-remainder", "fp8-hybrid", "sharded"), ("bf16-remainder", "16-mixed", "full"),
    ("32-true", "bf16-remainder", "sharded"), ("fp8-hybrid", "bf16-remainder", "full"),
    ("bf16-sr", "32-true", "sharded"), ("bf16-remainder", "bf16-sr", "full"),
    ("16-mixed", "fp8-hybrid-fp16", "sharded"),
)  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def float32_of(model, optimizer):
    """What the run computes with: masters, else weights; by fqn."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    stored = full(optimizer.state_dict())
    names = {id(p): fqn for fqn, p in model.named_parameters()}
    fqns = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    weights = full(dict(model.state_dict()))
    return {fqn: stored["state"][i].get("master_param", weights[fqn]).float() for i, fqn in enumerate(fqns)}


def moments_of(optimizer):
    return full(getattr(optimizer, "optimizer", optimizer).state_dict())["state"]


def crosses(rank, ranks, folder):
    for source, target, kind in CROSSINGS:
        name, path = f"{source} to {target}", folder / f"{source}.{target}.ckpt"
        fabric, model, optimizer = setup(source, ranks, kind=kind)
        train(fabric, model, optimizer, range(3), ranks)
        fabric.save(path, state(fabric, model, optimizer))
        exact, moments = float32_of(model.module, optimizer), moments_of(optimizer)
        scale = fabric.strategy.precision.state_dict().get("loss_scale") if "16" in source else None

        fabric, model, optimizer = setup(target, ranks, seed=8, kind=kind)
        fabric.load(path, state(fabric, model, optimizer))
        loaded = float32_of(model.module, optimizer)
        for fqn, value in exact.items():
            stochastic = target == "bf16-sr"  # has no master to keep it in
            expected = value.to(torch.bfloat16).float() if stochastic else value
            assert torch.equal(loaded[fqn], expected), f"{name}: {fqn}"
        for i, entry in moments_of(optimizer).items():
            assert torch.equal(entry["exp_avg"].float(), moments[i]["exp_avg"].float()), name
            assert entry["step"] == 3
        if scale is not None and fabric.strategy.precision.scaler is not None:
            assert fabric.strategy.precision.state_dict()["loss_scale"] == scale
        assert all(loss < 3 for loss in train(fabric, model, optimizer, range(3, 5), ranks)), name
    loading_is_no_step(rank, ranks, folder)


class Steps:
    """Counts the steps of an optimizer by torch's own hook."""

    def __init__(self, optimizer):
        self.count = 0
        optimizer.register_step_post_hook(self._note)

    def _note(self, *_):
        self.count += 1


def loading_is_no_step(rank, ranks, folder):
    """Neither saving nor loading steps, also before the first step; torch's own functions do."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    for precision in ("bf16-sr", "bf16-remainder", "fp8-hybrid-fp16"):
        fabric, model, optimizer = setup(precision, ranks)
        plain = optimizer.optimizer
        steps, before = Steps(plain), everything(model.module, optimizer, fabric.strategy.precision)
        path = folder / f"{precision}.no_step.ckpt"
        fabric.save(path, state(fabric, model, optimizer))
        fabric.load(path, state(fabric, model, optimizer))
        assert steps.count == 0
        assert plain.param_groups[0].get("rounding_step", 0) == 0
        after = everything(model.module, optimizer, fabric.strategy.precision)
        assert after["precision"] == before["precision"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            get_optimizer_state_dict(model.module, plain)
        assert steps.count == 1, "torch has changed: its own function would do now"


def test_any_into_any(tmp_path):
    launch(crosses, 2, tmp_path, tmp_path)
