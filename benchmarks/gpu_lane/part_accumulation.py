"""``accumulation``: 1, 4, 16 micro-batches per optimizer step; what caching FP8 weights between them is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu_lane import measure, models, setups
from benchmarks.gpu_lane.contenders import BASELINE, MAIN, MAIN_TE, TE, TE_COMPILED, Contender, contenders
from benchmarks.gpu_lane.item import Item, stage
from benchmarks.gpu_lane.running import Job
from benchmarks.gpu_lane.settings import Settings

COUNTS = (1, 4, 16)
OPTIONS = {f"{MAIN_TE}, weight_cache": {"weight_cache": True}, f"{MAIN_TE}, fp8_params": {"fp8_params": True}}
RANKED = (BASELINE, MAIN_TE, *OPTIONS, "te delayed", "te delayed, weights cached", MAIN, "torchao tensorwise, compiled",
          "te current", "te current, weights cached")  # fmt: skip
SECONDS = 3.0
"""Time for one count of micro-batches of one contender."""


class Accumulation:
    """The part."""

    name = "accumulation"

    def items(self, settings: Settings) -> list[Item]:
        device = settings.torch_device
        return [
            Item(key=c.key, seconds=2.0 if settings.smoke else 20.0, limit=120.0, missing=c.missing(device))
            for c in _everyone()
        ]

    def run(self, key: str, settings: Settings) -> dict[str, Any]:
        contender = next(c for c in _everyone() if c.key == key)
        shape = models.TOY if settings.smoke else models.SHAPES["accumulation"]
        return accumulate(contender, shape, settings)


def _everyone() -> list[Contender]:
    """The ranked ones, then every Transformer Engine name of ours, which may cache by itself."""
    known = {contender.key: contender for contender in contenders()}
    for recipe in ("delayed", "current"):
        cached = partial(setups.transformer_engine, recipe=recipe, cache_weights=True)
        key = f"te {recipe}, weights cached"
        known[key] = replace(known[f"te {recipe}"], key=key, setup=cached)
    for key, options in OPTIONS.items():
        setup = partial(setups.ours, name=MAIN_TE.removeprefix("ours "), options=options)
        known[key] = replace(known[MAIN_TE], key=key, setup=setup)
    te_of_ours = [key for key, c in known.items() if c.name is not None and c.needs == (TE,) and key != TE_COMPILED]
    return [known[key] for key in dict.fromkeys((*RANKED, *te_of_ours))]


def accumulate(contender: Contender, shape: models.Shape, settings: Settings) -> dict[str, Any]:
    """Milliseconds per optimizer step and per micro-batch, by number of micro-batches."""
    device = settings.torch_device
    measure.start_afresh(device)
    running = contender.setup(Job(shape=shape, device=device, compile=settings.compile))
    data = models.batches(shape, 1, device, count=COUNTS[-1])
    first = measure.seconds(lambda: running.step(data[:1]), device)
    rows: dict[str, dict[str, Any]] = {}
    for count in COUNTS:
        rows[str(count)] = _timed(partial(running.step, data[:count]), count, shape.sequence, settings)
        stage(f"{count} micro-batches", rows=rows)
    headline = ", ".join(f"{count}: {row['ms_per_micro_batch']:.2f} ms" for count, row in rows.items())
    measure.forget(device)
    return {
        "tokens_per_micro_batch": shape.sequence, "parameters": shape.parameters, "first_step_s": first, "rows": rows,
        "headline": f"ms per micro-batch, by their number: {headline}",
    }  # fmt: skip


def _timed(step: Callable[[], Any], count: int, tokens: int, settings: Settings) -> dict[str, Any]:
    device = settings.torch_device
    warm = [measure.seconds(step, device) * 1e3 for _ in range(1 if settings.smoke else 2)]
    rounds = 1 if settings.smoke else measure.rounds_within(min(warm), SECONDS, 5, 30)
    times, _ = measure.steps(lambda _: step(), rounds, device)
    row = measure.summary(times)
    return {**row, "ms_per_micro_batch": row["ms"] / count, "tokens_per_s": tokens * count / row["ms"] * 1e3}
