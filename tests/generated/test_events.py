"""What must change nothing changes no bit: programs that a seed draws, with and without it.

Between two batches a program looks at its model, copies, saves or evaluates it, drops a gradient, loads what it has; or
it ends after its first epoch and goes on from its file. The weights at the end are the same.
"""

import copy
import os
import warnings
from random import Random
from typing import Any

import pytest
import torch

from tests.fsdp2.ranks import launch
from tests.generated.programs import draw, trained

COUNT, AT_ONCE = int(os.environ.get("GENERATED", "60")) // 2, 10


def evaluate(task: Any, model: Any, batch: Any, **_: Any) -> None:
    task.eval()
    with torch.inference_mode():
        model(batch)
    task.train()


def evaluate_with_gradients(task: Any, model: Any, batch: Any, **_: Any) -> None:
    task.eval()
    model(batch).item()
    task.train()


def drop_a_loss(model: Any, batch: Any, **_: Any) -> None:
    model(batch)


def drop_a_gradient(model: Any, batch: Any, backward: Any, optimizers: Any, **_: Any) -> None:
    backward(1000 * model(batch))
    for optimizer in optimizers:
        optimizer.zero_grad()


def zero_again(optimizers: Any, **_: Any) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)
        optimizer.zero_grad()


def look(task: Any, optimizers: Any, **_: Any) -> None:
    for value in task.state_dict().values():
        value.float().sum()
    for optimizer in optimizers:
        optimizer.state_dict()


def load_own_weights(task: Any, **_: Any) -> None:
    task.load_state_dict(copy.deepcopy(task.state_dict()))


def load_own_state(optimizers: Any, **_: Any) -> None:
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def copy_model(task: Any, **_: Any) -> None:
    copied = copy.deepcopy(task.net)
    with torch.no_grad():
        for value in copied.parameters():
            value.fill_(1.0)


def save(save: Any, **_: Any) -> None:
    save()


def freeze_and_thaw(task: Any, **_: Any) -> None:
    trained = [value for value in task.parameters() if value.requires_grad]
    for wanted in (False, True):
        for value in trained:
            value.requires_grad_(wanted)


AT_ANY_TIME = (evaluate, evaluate_with_gradients, drop_a_loss, look, copy_model, save, freeze_and_thaw)
AFTER_A_STEP = (drop_a_gradient, zero_again, load_own_weights, load_own_state)
REFUSED_BY_TORCH = {"ddp": (drop_a_loss, evaluate_with_gradients), "fsdp2": (copy_model,)}


def difference(seed: int, strategy: str = "auto", rank: int = 0, ranks: int = 1) -> str:
    """Return where a program ends elsewhere with events between its batches, from a file, or in other words; or ""."""
    program, random, done = draw(seed), Random(seed), []
    program.world, program.rank = {"devices": ranks, "strategy": strategy}, rank
    program.average &= strategy != "ddp"  # which refuses parameters without a gradient
    in_words, program.resume, program.again = program.two_optimizers, False, False
    expected = trained(program, program.name)

    def between(i: int, batch: Any, **running: Any) -> None:
        stepped = (i + 1) % program.accumulate == 0
        event = random.choice(AT_ANY_TIME + AFTER_A_STEP * 2 * stepped)
        if event not in REFUSED_BY_TORCH.get(strategy, ()):
            done.append(event.__name__)
            event(batch=batch, **running)

    def ends_elsewhere(how: str) -> str:
        ended = trained(program, program.name)
        wrong = [name for name, value in expected.items() if not torch.equal(value, ended[name])]
        return f"{how}: {program}, {done}: {wrong}" if wrong else ""

    if in_words and program.clip != "norm" and not program.name.endswith("-sr"):
        program.two_optimizers, program.two_groups = False, True
        if found := ends_elsewhere("one optimizer for two"):
            return found
    program.between = between
    if found := ends_elsewhere("events"):
        return found
    program.resume = True
    return ends_elsewhere("events and a file")


def in_world(rank: int, ranks: int, seeds: range) -> None:
    warnings.simplefilter("ignore")
    in_ddp = {seed for seed in seeds if seed % 3 == 0 or draw(seed).name in ("msamp-o1", "msamp-o2")}
    for seed in seeds:
        found = difference(seed, "ddp" if seed in in_ddp else "fsdp2", rank, ranks)
        assert not found, found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_what_must_change_nothing_changes_no_bit(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not list(filter(None, map(difference, range(first, first + AT_ONCE))))


@pytest.mark.slow
@pytest.mark.distributed
def test_nor_does_it_on_two_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launch(in_world, 2, tmp_path, range(COUNT // 3))
