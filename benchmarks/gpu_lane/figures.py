"""What follows from the raw figures: ratios, limits, bounds, the table of gains, the targets. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu_lane.contenders import BASELINE, LIGHTNING_BF16, MAIN
from benchmarks.gpu_lane.linear_runs import BF16
from benchmarks.gpu_lane.part_linear import PEAKS
from benchmarks.gpu_lane.part_optimizer import FORMS
from benchmarks.gpu_lane.results import OK, figures_of

FP8_PEAK = "fp8 tensorwise"
Figures = Mapping[str, Any]
Shape = tuple[int, int, int]


def times(row: Figures, field: str = "ms") -> dict[str, float]:
    """Milliseconds by contender of one row of the linear table."""
    return {name: run[field] for name, run in row["runs"].items() if run.get("status") == OK}


def ratios(row: Figures, field: str = "ms") -> dict[str, float]:
    """How many times faster than bf16, by contender."""
    found = times(row, field)
    return {name: found[BF16] / ms for name, ms in found.items()} if BF16 in found else {}


def of_limit(row: Figures, peak_tflops: float) -> dict[str, float]:
    """The share of the peak rate that the three GEMMs of one Linear (6 M K N FLOPs) reach, by contender."""
    limit_ms = 6.0 * row["m"] * row["k"] * row["n"] / peak_tflops / 1e9
    return {name: limit_ms / ms for name, ms in times(row).items()}


def linear_rows(data: Figures) -> dict[Shape, Figures]:
    """The linear table by (M, K, N)."""
    return {(f["m"], f["k"], f["n"]): f for key, f in figures_of(dict(data), "linear").items() if key != PEAKS}


def peak_tflops(data: Figures) -> float | None:
    """The measured rate of large FP8 products."""
    for part in ("linear", "smoke"):
        rate = figures_of(dict(data), part).get(PEAKS, {}).get("tflops", {}).get(FP8_PEAK)
        if rate is not None:
            return float(rate)
    return None


def gains(data: Figures) -> list[dict[str, Any]]:
    """The linear table as ``layers/gains.py`` wants it: one entry per recipe and shape.

    ``ratio`` is by device time, ``loop_ratio`` by a loop over the layer alone, host included; for small layers the
    truth in a model lies between them.
    """
    run = data["runs"][-1]
    origin = {"device": run["machine"].get("device"), "date": run["date"], "smoke": run["smoke"]}
    found = []
    for (m, k, n), row in linear_rows(data).items():
        loops = ratios(row, "loop_ms")
        for name, ratio in ratios(row).items():
            backend, _, recipe = name.partition(" ")
            if backend in ("torchao", "te"):
                found.append(
                    {
                        **origin, "backend": backend, "recipe": recipe, "tokens": m, "in_features": k,
                        "out_features": n, "ratio": round(ratio, 4), "loop_ratio": round(loops[name], 4),
                    }
                )  # fmt: skip
    return found


def amdahl_by_time(step: Figures, baseline_ms: float, rows: Mapping[Shape, Figures]) -> float | None:
    """Speed over the baseline if each FP8 layer took exactly its time in the linear table, and the rest stayed.

    None if the table has not all shapes of this step, or not this recipe.
    """
    name, saved = step.get("linear"), 0.0
    for shape, count in step["fp8_shapes"].items():
        k, n = map(int, shape.split("x"))
        found = times(rows[step["tokens"], k, n]) if (step["tokens"], k, n) in rows else {}
        if name not in found or BF16 not in found:
            return None
        saved += count * (found[BF16] - found[name])
    return baseline_ms / (baseline_ms - saved) if step["fp8_shapes"] and saved < baseline_ms else None


def amdahl_by_flops(step: Figures, rows: Mapping[Shape, Figures]) -> float | None:
    """1 / (1 - s + s / r): s the FP8 share of matrix FLOPs, r how much faster the table's layers are together."""
    name, bf16, fp8 = step.get("linear"), 0.0, 0.0
    for shape, count in step["fp8_shapes"].items():
        k, n = map(int, shape.split("x"))
        found = times(rows[step["tokens"], k, n]) if (step["tokens"], k, n) in rows else {}
        if name not in found or BF16 not in found:
            return None
        bf16, fp8 = bf16 + count * found[BF16], fp8 + count * found[name]
    share = step["fp8_share"]
    return 1.0 / (1.0 - share + share * fp8 / bf16) if bf16 else None


def best_bf16(steps: Mapping[str, Figures]) -> str | None:
    """Lightning's own fastest bf16, of those that were measured."""
    found = [name for name in LIGHTNING_BF16 if name in steps]
    return min(found, key=lambda name: steps[name]["ms"]) if found else None


def speedups(steps: Mapping[str, Figures], baseline: str = BASELINE) -> dict[str, float]:
    """By contender: how many times faster than the baseline a step is."""
    if baseline not in steps:
        return {}
    return {name: steps[baseline]["ms"] / step["ms"] for name, step in steps.items()}


def optimizer_ratios(data: Figures) -> dict[str, float | None]:
    """By form of masters: time of a step over that of plain float32, of the implementation where it is larger."""
    found = figures_of(dict(data), "optimizer")
    by_form = {form: [f["ratio"] for key, f in found.items() if key.rpartition(", ")[0] == form] for form in FORMS}
    return {form: max(ratios, default=None) for form, ratios in by_form.items()}


def targets(data: Figures) -> list[dict[str, Any]]:
    """What this project asks of itself, what was measured (None: not), and whether that is enough."""
    steps, rows = figures_of(dict(data), "step8b"), linear_rows(data)
    ours = steps.get(MAIN)

    def over(name: str | None) -> float | None:
        return steps[name]["ms"] / ours["ms"] if ours is not None and name in steps else None

    bound = None
    if ours is not None and BASELINE in steps:
        bound = amdahl_by_time(ours, steps[BASELINE]["ms"], rows)
    reached = over(BASELINE)
    large = [
        max(r for name, r in ratios(row).items() if name.startswith(("torchao", "te ")))
        for (m, k, n), row in rows.items()
        if min(k, n) >= 8192 and m >= 8192 and len(ratios(row)) > 2
    ]
    overhead = figures_of(dict(data), "overhead")
    added = [row["added_ms"] for row in overhead.values() if "added_ms" in row]
    by_gain = [
        1 / slower
        for part in ("step8b", "step1b")
        for slower in _slower(figures_of(dict(data), part), "ours fp8-tensorwise, min_gain=auto")
    ]
    share = None if bound is None or reached is None else reached / bound
    wanted = [
        ("8B stack: fp8-tensorwise over Lightning's best bf16", ">=", 1.35, over(best_bf16(steps))),
        ("8B stack: share of the Amdahl bound over bf16-mixed, compiled", ">=", 0.90, share),
        ("8B stack: over raw torchao + compile", ">=", 0.99, over("torchao tensorwise, compiled")),
        ("8B stack: over raw TE", ">=", 0.99, over("te delayed")),
        ("8B stack: over Accelerate, torchao", ">", 1.0, over("accelerate torchao, compiled")),
        ("8B stack: over Accelerate, TE", ">", 1.0, over("accelerate te")),
        ("8B stack: over Lightning's transformer-engine", ">", 1.0, over("lightning transformer-engine")),
        ("linears of the 8192 class, the slowest of them, by its best recipe", ">=", 1.6, min(large, default=None)),
        ("host time per step that our plugin or strategy adds, ms", "<=", 0.3, max(added, default=None)),
        ("min_gain='auto' over bf16-mixed, compiled, the worst model", ">=", 0.98, min(by_gain, default=None)),
        *(
            (f"optimizer step, {form}, to plain float32, the worse of fused and foreach", "<=", 1.15, ratio)
            for form, ratio in optimizer_ratios(data).items()
        ),
    ]
    toys = any(run["smoke"] for run in data["runs"])
    return [
        {"target": text, "sign": sign, "wanted": value, "measured": found, "met": _met(sign, value, found)}
        if not toys
        else {"target": text, "sign": sign, "wanted": value, "measured": None, "met": None}
        for text, sign, value, found in wanted
    ]


def _slower(steps: Mapping[str, Figures], name: str) -> list[float]:
    return [steps[name]["ms"] / steps[BASELINE]["ms"]] if name in steps and BASELINE in steps else []


def _met(sign: str, wanted: float, measured: float | None) -> bool | None:
    if measured is None:
        return None
    return {">=": measured >= wanted, ">": measured > wanted, "<=": measured <= wanted}[sign]
