"""The curves of ``convergence`` compared at equal steps and at equal seconds. Pure functions of the results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from benchmarks.gpu_lane.contenders import BASELINE
from benchmarks.gpu_lane.part_convergence import SEED, TEXT
from benchmarks.gpu_lane.results import CUT_SHORT, figures_of

Data = dict[str, Any]
Run = Mapping[str, Any]
Runs = dict[str, dict[int, Run]]
"""By contender, then by seed."""
SAME = ("model", "layers", "batch", "text", "text_tokens", "learning_rate", "warm_up")
"""Runs that differ in one of these do not compare."""
FIXED_STEPS = (100, 200, 400)
SHARES = (0.25, 0.5, 1.0)
"""Of the seconds that every run trained."""


def runs(data: Data) -> tuple[Runs, dict[str, str]]:
    """Return the runs that compare, and why each other run does not, by key.

    All are compared with the first run of the baseline, or with the first run if the baseline has none.
    """
    found = {key: f for key, f in figures_of(data, "convergence").items() if key != TEXT}
    first = next((f for key, f in found.items() if key.startswith(BASELINE + SEED)), next(iter(found.values()), {}))
    kept: Runs = {}
    others: dict[str, str] = {}
    for key, figures in found.items():
        name, _, seed = key.rpartition(SEED)
        different = [field for field in SAME if figures.get(field) != first.get(field)]
        if figures.get("diverged"):
            others[key] = f"diverged before step {figures['steps']}"
        elif figures.get(CUT_SHORT):
            others[key] = f"cut short after {figures['training_s']:.0f} s"
        elif different:
            others[key] = f"another {', '.join(different)}"
        else:
            kept.setdefault(name, {})[int(seed)] = figures
    return kept, others


def every(compared: Runs) -> list[Run]:
    """Return the runs of all contenders and seeds."""
    return [run for by_seed in compared.values() for run in by_seed.values()]


def at_step(run: Run, step: int) -> float | None:
    """Return the validation loss at a step; None if the loss was not validated there."""
    return next((float(loss) for at, _, loss in run["points"] if at == step), None)


def at_second(run: Run, second: float) -> float | None:
    """Return the validation loss at a second of training, on straight lines between validations; None outside."""
    points = [(float(at), float(loss)) for _, at, loss in run["points"]]
    for (left, before), (right, after) in pairwise(points):
        if left <= second <= right:
            share = (second - left) / (right - left) if right > left else 0.0
            return before + share * (after - before)
    return next((loss for at, loss in points if at == second), None)


def common_steps(compared: Runs) -> list[int]:
    """Return the fixed steps that all runs reached, and the last step at which all were validated."""
    validated = [{at for at, _, _ in run["points"]} for run in every(compared)]
    common = set.intersection(*validated) if validated else set()
    return sorted({*common.intersection(FIXED_STEPS), *([max(common)] if common else [])})


def common_second(compared: Runs) -> float | None:
    """Return the seconds of training that every run reached."""
    return min((float(run["points"][-1][1]) for run in every(compared)), default=None)


def common_seconds(compared: Runs) -> list[float]:
    """Return the seconds at which losses are read."""
    last = common_second(compared)
    return [] if last is None else [share * last for share in SHARES]


def steps_within(run: Run, second: float) -> float:
    """Return how many steps fit into so many seconds."""
    return second / float(run["ms"]) * 1e3


Reading = Callable[[Run], float | None]


def mean_and_deviation(values: Iterable[float | None]) -> tuple[float, float | None] | None:
    """Return the mean over seeds and the standard deviation (None of one seed); None if a seed has no value."""
    numbers = list(values)
    if not numbers or any(value is None or not math.isfinite(value) for value in numbers):
        return None
    known = [float(value) for value in numbers if value is not None]
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None


def over_seeds(compared: Runs, name: str, read: Reading) -> tuple[float, float | None] | None:
    """Return the mean of a reading of a contender over its seeds."""
    return mean_and_deviation(read(run) for run in compared[name].values())


def less_baseline(compared: Runs, name: str, read: Reading) -> tuple[float, float | None] | None:
    """Return the mean difference to the baseline over the seeds that both have: same weights, same order of text."""
    base = compared.get(BASELINE, {})
    pairs = [(read(run), read(base[seed])) for seed, run in compared[name].items() if seed in base]
    return mean_and_deviation(None if a is None or b is None else a - b for a, b in pairs)
