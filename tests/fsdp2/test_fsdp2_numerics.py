"""FP8 all-gather changes nothing but the bytes: against torchao by hand, and one process; two gloo ranks."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lightning_lowprec import FP8TorchAO, parallelize
from tests.fsdp2.gathers import count_gathers, scales_of
from tests.fsdp2.models import Net, batch, full, hand_sharded, loss_of, with_conv1d
from tests.fsdp2.ranks import run

STEPS = 20
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def train(model, rank, after_step=lambda: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
    return full(model)


def sharded(mesh, fp8_all_gather, conv1d=False, param_dtype=torch.float32, **options):
    model = with_conv1d(Net()) if conv1d else Net()
    plugin = FP8TorchAO(emulate=True, **options)
    parallelize(model, mesh, plugin, fp8_all_gather=fp8_all_gather, param_dtype=param_dtype)
    return model, scales_of(model)


def runs(rank, mesh):
    """The same training in several ways, under a float32 policy."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    weights = {}
    model, scales = sharded(mesh, True)
    weights["ours"] = train(model, rank)
    reductions = scales.reductions
    model, scales = sharded(mesh, True)
    scales.weights = []  # nothing to refresh: every weight reduces its own scale
    weights["a scale reduced per weight"] = train(model, rank)
    weights["float32 gathered"] = train(sharded(mesh, False)[0], rank)
    model = hand_sharded(Net(), mesh, fp8=True, reduce_dtype=torch.float32)
    precompute_float8_dynamic_scale_for_fsdp(model)
    weights["torchao by hand"] = train(model, rank, lambda: precompute_float8_dynamic_scale_for_fsdp(model))
    weights["one process"] = one_process()
    return weights, reductions


def conv1d_runs(rank, mesh):
    """The same training with Conv1D layers, whose weights are [in, out]."""
    return train(sharded(mesh, True, conv1d=True)[0], rank)


def one_process():
    model, plugin = Net(), FP8TorchAO(emulate=True)
    plugin.bind_device(torch.device("cpu"))
    plugin.convert_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for rank in range(2):
            (loss_of(model, batch(step, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full(model)


IN_BF16 = ((), ("forward",), ("grad_weight",))
"""The products in bf16."""


def segment(model, rank, steps):
    """Some steps of SGD, which has no state; returns the whole weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full(model)


def recipes(rank, mesh, conv1d=False):
    """By products in bf16: weights of models whose gather may send codes, and sends values; and what was sent."""
    found = {}
    for gemms in IN_BF16:
        runs = []
        for fp8_all_gather in ("auto", False):
            recipe = {"*": dict.fromkeys(gemms, "bf16") or "tensorwise"}
            alone, scales = sharded(mesh, fp8_all_gather, conv1d, torch.bfloat16, recipe=recipe)
            gathers = count_gathers(alone)
            runs.append(segment(alone, rank, range(2)))
            if fp8_all_gather:
                kept = [weight._local_tensor._kept is not None for weight in scales.weights] if scales else []
                sent = dict(gathers["blocks.0"].calls)
        found[gemms] = *runs, sent, kept
    return found


def worker(rank):
    mesh = init_device_mesh("cpu", (2,))
    return {
        "runs": runs(rank, mesh),
        "conv1d": conv1d_runs(rank, mesh),
        "recipes": {kind: recipes(rank, mesh, conv1d=kind == "Conv1D") for kind in ("Linear", "Conv1D")},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("ranks"))


def test_every_way_of_gathering_gives_the_same_bits(results):
    weights = dict(results[0]["runs"][0])
    ours = weights.pop("ours")
    untrained = Net().state_dict()
    assert all(not torch.equal(ours[name], untrained[name]) for name in ours)
    assert results[0]["runs"][1] == STEPS, "one reduction of scales per step"
    for way, other in [*weights.items(), ("the other rank", results[1]["runs"][0]["ours"])]:
        assert ours.keys() == other.keys()
        for name in ours:
            assert torch.equal(ours[name], other[name]), (way, name)


def test_conv1ds_train_as_linears_do(results):
    """To the bit, after 20 steps on two ranks."""
    linears = results[0]["runs"][0]["one process"]
    for name, weight in results[0]["conv1d"].items():
        transposed = name.endswith(("up.weight", "down.weight"))
        assert torch.equal(weight.t() if transposed else weight, linears[name]), name


@pytest.mark.parametrize("kind", ["Linear", "Conv1D"])
def test_a_weight_is_gathered_as_the_products_of_its_recipe_read_it(results, kind):
    """A forward in bf16 reads a weight that came in bf16, also where codes were asked for."""
    for gemms, (asked, values, sent, kept) in results[0]["recipes"][kind].items():
        codes = "forward" not in gemms
        assert sent == {torch.uint8 if codes else torch.bfloat16: 4}, "two steps, forward and backward"
        assert kept == ([True] * 4 if codes else [])
        assert codes or all(torch.equal(asked[name], values[name]) for name in asked), gemms
        assert all(torch.equal(asked[name], results[1]["recipes"][kind][gemms][0][name]) for name in asked)
