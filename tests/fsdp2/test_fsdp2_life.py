"""What happens to a sharded model in its life: optimizers early and late, evaluation, accumulation, loading."""

import logging
import tempfile
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO
from lightning_lowprec.callbacks import NumericsMonitor
from tests.fsdp2 import toy
from tests.fsdp2.models import WIDTH, Net, batch, full, loss_of, same
from tests.fsdp2.ranks import parts, run
from tests.toys import Block, adamw, stepped

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def fabric_for(precision="fp8-hybrid", **options):
    return toy.fabric_for(precision, 2, strategy=FabricFSDP2Strategy(**options))


def set_up(fabric, model=None):
    model = Net() if model is None else model
    return fabric.setup(model, adamw(model, 1e-2))


def trained(fabric, model, optimizer, rank, numbers=range(4)):
    losses = stepped(fabric, optimizer, (loss_of(model, batch(number, rank)) for number in numbers))
    return full(model), losses


def optimizers_built_early_late_or_jointly_train_alike(rank):
    fabric = fabric_for()
    jointly, _ = trained(fabric, *set_up(fabric), rank)
    untrained = Net().state_dict()
    assert not any(torch.equal(untrained[name], weight) for name, weight in jointly.items())

    model = fabric.setup_module(Net())
    assert same(jointly, trained(fabric, model, fabric.setup_optimizers(adamw(model, 1e-2)), rank)[0])

    stepped = adamw(model := Net(), 1e-2)
    loss_of(model, batch(50, 0)).backward()
    stepped.step()
    for p in model.parameters():
        stepped.state[p]["history"] = torch.ones(3)  # no value for each element
    before = [{k: v.clone() for k, v in stepped.state[p].items()} for p in model.parameters()]
    model, stepped = fabric.setup(model, stepped)
    for entry, p in zip(before, model.parameters(), strict=True):
        for name, value in entry.items():
            after = stepped.state[p][name]
            assert torch.equal(value, toy.full(after)), "state from before the set-up is sharded with its parameter"
            assert isinstance(after, DTensor) == (value.shape == p.shape)


def a_value_that_is_not_finite_on_one_rank_costs_all_ranks_the_step(rank):
    for make in (
        lambda: FP8TorchAO(skip_nonfinite=True),
        lambda: FP8TorchAO(master_weights="remainder", skip_nonfinite=True),
        lambda: FP8TorchAO(base="fp16"),
    ):
        weights = []
        for bad in (1, None):
            fabric = fabric_for(plugin := make())
            model, optimizer = set_up(fabric)
            for number in range(3):
                if number == 1 and bad is None:
                    continue
                fabric.backward(loss_of(model, batch(number, rank)))
                if number == bad and rank == 1:
                    next(model.parameters()).grad.to_local().view(-1)[0] = float("nan")
                optimizer.step()
                optimizer.zero_grad()
            assert (plugin.scaler or plugin).skipped_steps == (bad is not None)
            weights.append(full(model))
        assert same(*weights), plugin


def options_change_where_not_what(rank):
    losses = {}
    for name, options in {
        "plain": {},
        "recomputed": {"activation_checkpointing": True},
        "recomputed by class": {"activation_checkpointing": {Block}, "wrap": [Block]},
        "kept after forward": {"reshard_after_forward": False},
        "offloaded": {"cpu_offload": True},
        "the whole model compiled": {},
        "by predicate": {"wrap": lambda fqn, module: fqn.endswith(("blocks.1", "up", "down"))},
    }.items():
        fabric = fabric_for(**options)
        model = Net()
        if "compiled" in name:
            torch._dynamo.reset()
            model = torch.compile(model, backend="aot_eager")
        losses[name] = trained(fabric, *set_up(fabric, model), rank)[1]
        assert losses[name] == losses["plain"], name


class Drawn(Net):
    def __init__(self, seed=0):
        super().__init__(seed)
        self.register_buffer("drawn", torch.randn(3))
        self.register_buffer("outside", torch.randn(3), persistent=False)

    def get_extra_state(self):
        return not self.drawn.is_meta

    def set_extra_state(self, state):
        assert state, "that of rank 0"


def weights_that_only_rank_0_has_or_nobody(rank):
    """Or each rank its own."""
    fabric = fabric_for()
    with nullcontext() if rank == 0 else torch.device("meta"):
        model = Drawn(seed=rank)
    sent = fabric_for(sync_module_states=True).setup_module(model)
    assert same(Drawn().state_dict(), full(sent))
    assert all(map(torch.equal, sent.buffers(), Drawn().buffers())), "those that no state dict holds, too"
    with torch.device("meta"):
        model = Net()
        model.statistics = nn.BatchNorm1d(WIDTH, affine=False)
    torch.manual_seed(3)
    made = fabric.setup_module(model)
    assert made.statistics.running_var.tolist() == [1.0] * WIDTH, "of a module that has buffers alone"
    assert loss_of(made, batch(0, rank)).item() < 10
    dist.barrier()
    weights = full(made)
    assert weights["blocks.0.up.weight"].std() > 0.01, "initialised by the modules themselves"
    assert same(weights, fabric.broadcast(weights))
    for asked in (True, False):
        sent = fabric_for(sync_module_states=asked).setup_module(Drawn(seed=rank))
        assert same(full(sent), {**Drawn().state_dict(), "drawn": sent.drawn}) == asked
        assert all(map(torch.equal, sent.buffers(), Drawn().buffers())) == (asked or rank == 0)


def read_first_step(fabric, tokens, **options):
    model, optimizer = set_up(fabric)
    monitor = NumericsMonitor(every=1, rows=1.0, **options)
    monitor.step(model, 0)
    fabric.backward(loss_of(model, tokens))
    optimizer.step()
    return {(reading.fqn, reading.tensor): reading for reading in monitor.finish()}


def a_monitor_reads_the_whole_weight_from_shards(rank):
    """What one process reads, of the tokens of both ranks."""
    fabric = fabric_for()
    folder = fabric.broadcast(tempfile.mkdtemp())
    found = read_first_step(fabric, batch(0, rank), folder=folder)
    assert repr(found) == fabric.broadcast(repr(found))
    fabric.barrier()
    with open(f"{folder}/numerics.jsonl") as file:
        assert len(file.readlines()) == 1, "one rank writes"
    both = torch.cat([batch(0, rank) for rank in range(2)])
    alone = read_first_step(L.Fabric(accelerator="cpu", devices=1, precision="fp8-hybrid"), both)
    assert found.keys() == alone.keys()
    for key, one in alone.items():
        assert abs(found[key].output_db - one.output_db) < 1.5
        if key[1] == "weight":
            assert (found[key].amax, found[key].scale, found[key].underflow) == (one.amax, one.scale, one.underflow)
    first = ("blocks.0.up", "input")
    assert found[first].amax == alone[first].amax


def early_optimizers_of_several_models_train_each_model(rank):
    """As of a GAN. In bf16-mixed no layer is converted, so nothing refuses an optimizer without parameters."""
    fabric = fabric_for("bf16-mixed")
    alone, _ = trained(fabric, *set_up(fabric), rank)
    made = [Net(), Net(), Net()]
    early = [adamw(model, 1e-2) for model in made]
    held = early[1].param_groups[0]["params"]
    models, said = [fabric.setup_module(model) for model in made], []
    logging.getLogger("lightning_lowprec").addFilter(lambda record: said.append(record.getMessage()) or True)
    for model, optimizer in zip(models, fabric.setup_optimizers(*early), strict=True):
        assert same(alone, trained(fabric, model, optimizer, rank)[0])
    assert early[1].param_groups[0]["params"] is held, "LBFGS keeps the list"
    assert sum("all-gather: bfloat16" in line for line in said) == (3 if rank == 0 else 0), "of each model"


@parts(
    early_optimizers_of_several_models_train_each_model,
    optimizers_built_early_late_or_jointly_train_alike,
    a_value_that_is_not_finite_on_one_rank_costs_all_ranks_the_step,
    options_change_where_not_what,
    weights_that_only_rank_0_has_or_nobody,
    a_monitor_reads_the_whole_weight_from_shards,
)
def test_two_ranks(part, tmp_path):
    run(part[0], 2, tmp_path)
