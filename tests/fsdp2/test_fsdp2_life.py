"""What happens to a sharded model in its life: optimizers early and late, evaluation, accumulation, loading."""

import itertools
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO
from lightning_lowprec.callbacks import NumericsMonitor
from tests.fsdp2 import toy
from tests.fsdp2.models import Net, batch, full, loss_of, same
from tests.fsdp2.ranks import run
from tests.toys import Block, adamw

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def fabric_for(precision="fp8-hybrid", **options):
    words = {"precision": precision} if isinstance(precision, str) else {"plugins": precision}
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricFSDP2Strategy(**options), **words)
    fabric.launch()
    return fabric


def set_up(fabric, model=None):
    model = Net() if model is None else model
    return fabric.setup(model, adamw(model, 1e-2))


def step(fabric, model, optimizer, number, rank, **kwargs):
    loss = loss_of(model, batch(number, rank))
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(fabric, model, optimizer, rank, steps=4):
    losses = [step(fabric, model, optimizer, number, rank) for number in range(steps)]
    return full(model), losses


def optimizers(rank):
    weights = {}
    fabric = fabric_for()
    model, optimizer = set_up(fabric)
    weights["joint"] = trained(fabric, model, optimizer, rank)[0]

    model = Net()
    early = adamw(model, 1e-2)
    model = fabric.setup_module(model)
    weights["early"] = trained(fabric, model, fabric.setup_optimizers(early), rank)[0]

    model = fabric.setup_module(Net())
    weights["late"] = trained(fabric, model, fabric.setup_optimizers(adamw(model, 1e-2)), rank)[0]

    model = Net()
    stepped = adamw(model, 1e-2)
    loss_of(model, batch(50, 0)).backward()
    stepped.step()
    before = {i: {k: v.clone() for k, v in stepped.state[p].items()} for i, p in enumerate(model.parameters())}
    model, stepped = fabric.setup(model, stepped)
    after = {i: dict(stepped.state[p].items()) for i, p in enumerate(model.parameters())}
    moved = all(
        torch.equal(value, toy.full(after[i][name])) and isinstance(after[i][name], DTensor) == (value.ndim > 0)
        for i, entry in before.items()
        for name, value in entry.items()
    )
    return weights, moved


def evaluation(rank):
    fabric = fabric_for()
    results = []
    for evaluate in (nullcontext, torch.inference_mode):
        model, optimizer = set_up(fabric)
        losses = []
        for number in range(3):
            with torch.no_grad(), evaluate():
                losses.append(loss_of(model.eval(), batch(90, rank)).item())
            model.train()
            losses.append(step(fabric, model, optimizer, number, rank))
        results.append((losses, full(model)))
    return results


SKIPPING = {
    "float32": lambda: FP8TorchAO(skip_nonfinite=True),
    "remainder": lambda: FP8TorchAO(master_weights="remainder", skip_nonfinite=True),
    "fp16": lambda: FP8TorchAO(base="fp16"),
}


def skipping(rank):
    found = {}
    for name, bad in itertools.product(SKIPPING, (1, None)):
        fabric = fabric_for(plugin := SKIPPING[name]())
        model, optimizer = set_up(fabric)
        for number in range(3):
            if number == 1 and bad is None:
                continue
            fabric.backward(loss_of(model, batch(number, rank)))
            if number == bad and rank == 1:
                next(model.parameters()).grad.to_local().view(-1)[0] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
        found[name, bad] = full(model), (plugin.scaler or plugin).skipped_steps
    return found


def variants(rank):
    losses = {}
    for name, options in {
        "plain": {},
        "recomputed": {"activation_checkpointing": True},
        "recomputed by class": {"activation_checkpointing": {Block}, "wrap": [Block]},
        "kept after forward": {"reshard_after_forward": False},
        "offloaded": {"cpu_offload": True},
        "the whole model compiled": {},
        "by predicate": {"wrap": lambda fqn, module: fqn.endswith(("up", "down"))},
    }.items():
        fabric = fabric_for(**options)
        model = Net()
        if "compiled" in name:
            torch._dynamo.reset()
            model = torch.compile(model, backend="aot_eager")
        model, optimizer = set_up(fabric, model)
        losses[name] = trained(fabric, model, optimizer, rank)[1]
    return losses


def origins(rank):
    fabric = fabric_for()
    model = Net()
    if rank == 1:
        model.lm_head.to("meta")
    with pytest.raises(RuntimeError, match="the ranks have: real, mixed"):
        fabric.setup_module(model)
    real = full(fabric.setup_module(Net()))
    with nullcontext() if rank == 0 else torch.device("meta"):
        model = Net()
    sent = full(fabric.setup_module(model))
    with torch.device("meta"):
        model = Net()
    torch.manual_seed(3)
    made = fabric.setup_module(model)
    loss = loss_of(made, batch(0, rank)).item()
    dist.barrier()
    return {name: torch.equal(real[name], sent[name]) for name in real}, loss, full(made)


def read_first_step(fabric, tokens):
    model, optimizer = set_up(fabric)
    monitor = NumericsMonitor(every=1, rows=1.0)
    monitor.step(model, 0)
    fabric.backward(loss_of(model, tokens))
    optimizer.step()
    return {(reading.fqn, reading.tensor): reading for reading in monitor.finish()}


def from_rank_0(rank):
    same = {}
    for asked in (True, False):
        model = fabric_for(sync_module_states=asked).setup_module(Net(seed=rank))
        same[asked] = all(torch.equal(weight, Net().state_dict()[name]) for name, weight in full(model).items())
    return same


def monitored(rank):
    return read_first_step(fabric_for(), batch(0, rank))


def worker(rank):
    parts = (optimizers, evaluation, skipping, variants, origins, from_rank_0, monitored)
    return {part.__name__: part(rank) for part in parts}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("ranks"))


def test_optimizers_built_early_late_or_jointly_train_alike(results):
    weights, moved = results[0]["optimizers"]
    untrained = Net().state_dict()
    assert not any(torch.equal(untrained[name], weight) for name, weight in weights["joint"].items())
    assert same(weights["joint"], weights["early"])
    assert same(weights["joint"], weights["late"])
    assert moved, "state from before the set-up is sharded with its parameter"


def test_inference_mode_changes_nothing(results):
    plain, inferred = results[0]["evaluation"]
    assert plain[0] == inferred[0]
    assert same(plain[1], inferred[1])


def test_a_value_that_is_not_finite_on_one_rank_costs_all_ranks_the_step(results):
    for found, name in itertools.product(results, SKIPPING):
        (weights, skipped), (wanted, none) = (found["skipping"][name, bad] for bad in (1, None))
        assert (skipped, none) == (1, 0)
        assert same(weights, wanted)


def test_options_change_where_not_what(results):
    losses = results[0]["variants"]
    for name, values in losses.items():
        assert values == losses["plain"], name


def test_weights_from_rank_0_from_nowhere(results):
    (sent, _, made), (also_sent, _, also_made) = (results[rank]["origins"] for rank in range(2))
    assert all(sent.values())
    assert all(also_sent.values())
    assert same(made, also_made)
    assert results[0]["origins"][1] < 10
    assert made["blocks.0.up.weight"].std() > 0.01, "initialised by the modules themselves"


def test_sync_module_states(results):
    assert [results[rank]["from_rank_0"] for rank in range(2)] == [{True: True, False: False}] * 2


def test_a_monitor_reads_the_whole_weight_from_shards(results):
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="fp8-hybrid")
    alone = read_first_step(fabric, torch.cat([batch(0, rank) for rank in range(2)]))
    found, other = (results[rank]["monitored"] for rank in range(2))
    assert repr(found) == repr(other)
    assert found.keys() == alone.keys()
    for key, one in alone.items():
        if key[1] == "weight":
            assert (found[key].amax, found[key].scale, found[key].underflow) == (one.amax, one.scale, one.underflow)
    first = ("blocks.0.up", "input")
    assert found[first].amax == alone[first].amax
