"""The report's section on ``convergence``: losses at equal steps, losses at equal seconds, and speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu_lane import curves
from benchmarks.gpu_lane.contenders import BASELINE
from benchmarks.gpu_lane.curves import Reading, Runs
from benchmarks.gpu_lane.markdown import Row, number, table
from benchmarks.gpu_lane.part_convergence import TEXT
from benchmarks.gpu_lane.predictions import predicted_ms
from benchmarks.gpu_lane.results import figures_of

Data = dict[str, Any]
Figure = tuple[float, float | None] | None


def convergence(data: Data) -> str:
    """Return the section; empty if nothing was trained."""
    compared, others = curves.runs(data)
    left_out = "; ".join(f"{key} ({why})" for key, why in others.items())
    text = f"Not compared: {left_out}." if left_out else ""
    if not compared:
        return text
    steps, seconds = curves.common_steps(compared), curves.common_seconds(compared)
    return "\n\n".join(filter(None, (
        _head(data, compared), _losses(compared, steps, seconds), _speed(data, compared, seconds[-1]), text,
    )))  # fmt: skip


def _head(data: Data, compared: Runs) -> str:
    run, facts = curves.every(compared)[0], figures_of(data, "convergence").get(TEXT, {})
    text = f"text with digest {run['text'][:16]}"
    if facts:
        text += f": {facts['train_tokens']} tokens to learn and {facts['val_tokens']} to validate"
    epochs = max(r["epochs"] for r in curves.every(compared))
    return (
        f"{run['parameters'] / 1e6:.1f} million parameters, {run['tokens']} tokens per step, {text}. The run that read"
        f" most read {epochs:.2f} of the text. Everyone has the same initial weights, order of text and learning rates"
        f" ({run['learning_rate']:g} after {run['warm_up']} steps). Losses are of validation, in the precision of the"
        " contender: means over seeds, with the standard deviation where there are several seeds. `step` compares at"
        " equal steps; `s` compares at equal seconds of training, without compilation and validation. Differences are"
        f" to {BASELINE} with the same seed; below zero is better."
        " Differences within the deviation say nothing; of one seed, the deviation is not known."
    )


def _losses(compared: Runs, steps: list[int], seconds: list[float]) -> str:
    read: dict[str, Reading] = {f"step {at}": partial(curves.at_step, step=at) for at in steps}
    by_second: dict[str, Reading] = {f"{at:.1f} s": partial(curves.at_second, second=at) for at in seconds}
    head, cells = ["contender", "seeds"], []
    for readings in (read, by_second):
        head += readings
        cells += [partial(curves.over_seeds, compared, read=reading) for reading in readings.values()]
        if readings:
            head.append(f"difference at {list(readings)[-1]}")
            cells.append(partial(curves.less_baseline, compared, read=list(readings.values())[-1]))
    rows = [(name, len(compared[name]), *(_figure(cell(name=name)) for cell in cells)) for name in compared]
    return table(head, rows)


def _figure(found: Figure) -> str:
    if found is None:
        return "-"
    mean, deviation = found
    return f"{mean:.4f}" if deviation is None else f"{mean:.4f} ± {deviation:.4f}"


def _speed(data: Data, compared: Runs, second: float) -> str:
    first = curves.every(compared)[0]
    predicted, label = predicted_ms(data, first["model"], first["batch"])
    base = _median(compared, BASELINE, "ms")

    def row(name: str) -> Row:
        median: Callable[[str], float | None] = partial(_median, compared, name)
        ms = median("ms") or 0.0
        steps = statistics.median(curves.steps_within(run, second) for run in compared[name].values())
        peak = median("peak_bytes")
        return (
            name, number(ms / 1e3, 4), number(predicted[name] / 1e3 if name in predicted else None, 4),
            f"{median('tokens_per_s'):.0f}", number(base / ms if base and ms else None), f"{steps:.0f}",
            number(median("matrix_tflops"), 1), number(median("compile_s"), 1), number(median("validation_s"), 1),
            number(None if peak is None else peak / 1e9, 1),
        )  # fmt: skip

    head = ("contender", "seconds per step", "predicted", "tokens/s", "over bf16-mixed, compiled",
            f"steps in {second:.1f} s", "matrix TFLOP/s", "compilation s", "validation s", "peak GB")  # fmt: skip
    note = (
        f"`predicted` is the ledger's, by rates {label}: rates of the large products of an 8B-shaped step, which"
        " products of width 768 will not reach, so steps will take longer. Medians over seeds."
        if predicted
        else "The ledger has counted no model of this size and batch, so no time is predicted. Medians over seeds."
    )
    return f"{table(head, [row(name) for name in compared])}\n\n{note}"


def _median(compared: Runs, name: str, field: str) -> float | None:
    values = [float(run[field]) for run in compared.get(name, {}).values() if field in run]
    return statistics.median(values) if values else None
