"""What this project asks of itself, what was measured, and whether that is enough. Pure functions of the results."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_lane import figures
from benchmarks.gpu_lane.contenders import BASELINE, BF16_TRUE, BF16_WEIGHTS, MAIN, MAIN_TE, TE_COMPILED
from benchmarks.gpu_lane.models import SHAPES
from benchmarks.gpu_lane.results import means_nothing

Data = dict[str, Any]
Target = dict[str, Any]
"""``target`` and ``sign`` in words, ``wanted``, ``measured`` (None: not), ``met``."""
BY_GAIN = "ours fp8-hybrid, min_gain=auto"
OVER_BF16 = 1.35
"""Wanted of FP8 over bf16 with weights of the same dtype."""
WANTED_LAYERS = SHAPES["8b"].layers
"""What the targets are about; a device with less memory measures fewer."""


def targets(data: Data) -> list[Target]:
    """All of them, the 8B-shaped stack judged by what ``fp8-hybrid`` means."""
    return [*of_the_stack(data, MAIN), *_of_bf16_weights(data), *_of_layers(data)]


def of_the_stack(data: Data, ours: str) -> list[Target]:
    """What is asked of ``fp8-hybrid`` on the 8B-shaped stack, of this contender."""
    steps, rows = figures.comparable(data, "step8b"), figures.linear_rows(data)

    def over(name: str | None) -> float | None:
        return steps[name]["ms"] / steps[ours]["ms"] if ours in steps and name in steps else None

    bound = None
    if ours in steps and BASELINE in steps:
        bound = figures.amdahl(steps[ours], steps[BASELINE]["ms"], rows)
    reached = over(BASELINE)
    share = None if bound is None or reached is None else reached / bound
    wanted = [
        ("over Lightning's bf16-mixed, compiled, whose weights are float32 too", ">=", OVER_BF16, over(BASELINE)),
        ("over Lightning's best bf16", ">=", OVER_BF16, over(figures.best_bf16(steps))),
        ("share of the Amdahl bound over bf16-mixed, compiled", ">=", 0.90, share),
        ("over raw torchao + compile", ">=", 0.99, over("torchao tensorwise, compiled")),
        ("over raw TE", ">=", 0.99, over("te delayed")),
        ("over Accelerate, torchao", ">", 1.0, over("accelerate torchao, compiled")),
        ("over Accelerate, TE", ">", 1.0, over("accelerate te")),
        ("over Lightning's transformer-engine", ">", 1.0, over("lightning transformer-engine")),
    ]
    return [_judged(data, f"{_stack(steps, ours)}: {text}", *rest) for text, *rest in wanted]


def _of_bf16_weights(data: Data) -> list[Target]:
    """FP8 without float32 weights, like for like: against Lightning's bf16-true."""
    steps = figures.comparable(data, "step8b")
    both = BF16_WEIGHTS in steps and BF16_TRUE in steps
    ratio = steps[BF16_TRUE]["ms"] / steps[BF16_WEIGHTS]["ms"] if both else None
    text = f"{_stack(steps, BF16_WEIGHTS)}: over Lightning's bf16-true, compiled"
    return [_judged(data, text, ">=", OVER_BF16, ratio)]


def _stack(steps: dict[str, Any], ours: str) -> str:
    """The stack that was measured, and the name of ours."""
    layers = steps[ours].get("layers", WANTED_LAYERS) if ours in steps else WANTED_LAYERS
    stack = "8B stack" if layers == WANTED_LAYERS else f"8B stack of {layers} layers instead of {WANTED_LAYERS}"
    return f"{stack}, {ours.removeprefix('ours ')}"


def faster_backend(data: Data) -> str:
    """Which backend makes ``fp8-hybrid`` faster on this device, with the evidence, in one line."""
    steps, device = figures.comparable(data, "step8b"), data["runs"][-1]["machine"].get("device")
    absent = [name for name in (MAIN, MAIN_TE) if name not in steps]
    if absent or any(map(means_nothing, data["runs"])):
        why = f"{' and '.join(absent)} not measured" if absent else "the figures mean nothing"
        return f"fp8-hybrid: not settled on {device} ({why})."
    fast, slow = sorted((MAIN, MAIN_TE), key=lambda name: steps[name]["ms"])
    step, title = steps[fast], {MAIN: "torchao", MAIN_TE: "Transformer Engine"}
    count = len(step.get("samples", []))
    evidence = [
        f"step8b, {step.get('layers')} layers, {step['tokens']} tokens per step, medians of {count} steps:"
        f" {step['ms']:.1f} ms against {steps[slow]['ms']:.1f} ms"
    ]
    if all("peak_bytes" in steps[name] for name in (fast, slow)):
        peaks = " against ".join(f"{steps[name]['peak_bytes'] / 1e9:.1f} GB" for name in (fast, slow))
        evidence.append(f"peak memory {peaks}")
    evidence += [f"{name.removeprefix('ours ')} {steps[name]['ms']:.1f} ms" for name in (TE_COMPILED,) if name in steps]
    return (
        f"fp8-hybrid: {title[fast]} ({fast}) is {steps[slow]['ms'] / steps[fast]['ms']:.3f} times as fast as"
        f" {title[slow]} ({slow}) on {device} (evidence: {'; '.join(evidence)})."
    )


def _of_layers(data: Data) -> list[Target]:
    large = [
        max(r for name, r in figures.ratios(row).items() if name.startswith(("torchao", "te ")))
        for (m, k, n), row in figures.linear_rows(data).items()
        if min(k, n) >= 8192 and m >= 8192 and len(figures.ratios(row)) > 2
    ]
    speed = figures.speedups(figures.comparable(data, "step8b")).get(BY_GAIN)
    found = [
        ("linears of the 8192 class, the slowest of them, by its best recipe", ">=", 1.6, min(large, default=None)),
        ("8B stack, min_gain='auto': over bf16-mixed, compiled", ">=", 0.98, speed),
    ]
    return [_judged(data, *target) for target in found]


def _judged(data: Data, text: str, sign: str, wanted: float, measured: float | None) -> Target:
    """Figures that mean nothing meet and miss nothing."""
    found = None if any(map(means_nothing, data["runs"])) else measured
    return {"target": text, "sign": sign, "wanted": wanted, "measured": found, "met": _met(sign, wanted, found)}


def _met(sign: str, wanted: float, measured: float | None) -> bool | None:
    if measured is None:
        return None
    return {">=": measured >= wanted, ">": measured > wanted, "<=": measured <= wanted}[sign]
