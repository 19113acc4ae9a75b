"""What follows from the raw figures: ratios, bounds, the table of gains, tables as Markdown. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu_lane.contenders import BASELINE, BF16_TRUE, LIGHTNING_BF16
from benchmarks.gpu_lane.linear_runs import BF16, FLOAT32, column
from benchmarks.gpu_lane.part_linear import PEAKS
from benchmarks.gpu_lane.results import OK, figures_of, means_nothing

Figures = Mapping[str, Any]
Shape = tuple[int, int, int]
Row = Iterable[object]


def times(row: Figures) -> dict[str, float]:
    """Milliseconds by contender of one row of the linear table."""
    return {name: run["ms"] for name, run in row["runs"].items() if run.get("status") == OK}


def ratios(row: Figures) -> dict[str, float]:
    """How many times faster than bf16 with weights of the same dtype, by contender."""
    found = times(row)
    base = {name: BF16 + FLOAT32 if name.endswith(FLOAT32) else BF16 for name in found}
    return {name: found[base[name]] / ms for name, ms in found.items() if base[name] in found}


def linear_rows(data: Figures) -> dict[Shape, Figures]:
    """The linear table by (M, K, N)."""
    return {(f["m"], f["k"], f["n"]): f for key, f in figures_of(dict(data), "linear").items() if key != PEAKS}


def gains(data: Figures) -> list[dict[str, Any]]:
    """The linear table as ``conversion/gains.py`` wants it: one entry per recipe and shape, by device time."""
    run = data["runs"][-1]
    origin = {"device": run["machine"].get("device"), "date": run["date"], "smoke": bool(means_nothing(run))}
    found = []
    for (m, k, n), row in linear_rows(data).items():
        for name, ratio in ratios(row).items():
            backend, _, recipe = name.partition(" ")
            if backend in ("torchao", "te") and not name.endswith(FLOAT32):
                found.append(
                    {
                        **origin, "backend": backend, "recipe": recipe, "tokens": m, "in_features": k,
                        "out_features": n, "ratio": round(ratio, 4),
                    }
                )  # fmt: skip
    return found


def amdahl(step: Figures, baseline_ms: float, rows: Mapping[Shape, Figures]) -> float | None:
    """Speed over the baseline if each FP8 layer took exactly its time in the linear table, and the rest stayed.

    The baseline is ``counterpart(step)``: bf16 with weights of the same dtype. None if the table has not all shapes of
    this step, or not this recipe with weights of that dtype.
    """
    weights = step.get("weights", "float32")
    bf16, fp8 = column(BF16, weights), column(step.get("linear") or "", weights)
    saved = 0.0
    for shape, count in step["fp8_shapes"].items():
        k, n = map(int, shape.split("x"))
        found = times(rows[step["tokens"], k, n]) if (step["tokens"], k, n) in rows else {}
        if bf16 not in found or fp8 not in found:
            return None
        saved += count * (found[bf16] - found[fp8])
    return baseline_ms / (baseline_ms - saved) if step["fp8_shapes"] and saved < baseline_ms else None


def counterpart(step: Figures) -> str:
    """Lightning's bf16 with weights of the same dtype: what FP8 is compared with like for like."""
    return BF16_TRUE if step.get("weights") == "bfloat16" else BASELINE


def comparable(data: Figures, part: str) -> dict[str, Figures]:
    """The steps of a part that have the baseline's layers and tokens: another batch compares with nothing."""
    steps = figures_of(dict(data), part)
    base = steps.get(BASELINE)
    return steps if base is None else {name: step for name, step in steps.items() if size(step) == size(base)}


def size(step: Figures) -> tuple[int | None, int]:
    """Layers and tokens of a step."""
    return step.get("layers"), step["tokens"]


def best_bf16(steps: Mapping[str, Figures]) -> str | None:
    """Lightning's own fastest bf16, of those that were measured."""
    found = [name for name in LIGHTNING_BF16 if name in steps]
    return min(found, key=lambda name: steps[name]["ms"]) if found else None


def speedups(steps: Mapping[str, Figures], baseline: str = BASELINE) -> dict[str, float]:
    """By contender: how many times faster than the baseline a step is."""
    if baseline not in steps:
        return {}
    return {name: steps[baseline]["ms"] / step["ms"] for name, step in steps.items()}


def table(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table; empty if there are no rows."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    head = list(head)
    return "\n".join([f"| {' | '.join(map(str, head))} |", "|" + "---|" * len(head), *lines]) if lines else ""


def number(value: object, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "-" if value is None else str(value)
