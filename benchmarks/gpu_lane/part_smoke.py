"""``smoke``: in about a minute, does anything FP8 run here; ``smoke-all``: who of the contenders can train at all."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu_lane import measure, models
from benchmarks.gpu_lane.contenders import MAIN, MAIN_TE, contenders, find
from benchmarks.gpu_lane.item import Item
from benchmarks.gpu_lane.linear_runs import BF16, Problem, make, why_not
from benchmarks.gpu_lane.part_linear import measure_peaks
from benchmarks.gpu_lane.running import Job, low_precision_layers
from benchmarks.gpu_lane.settings import Settings
from benchmarks.gpu_lane.values import values_exist
from lightning_lowprec.tools.doctor import survey

SUPPORT, PEAKS, LINEAR = "support", "peaks", "linear "
TOY_STEP, COMPILED = "toy step: ", " (blocks compiled)"
ALL = "smoke-all"
FEW = (MAIN, MAIN_TE)
"""The toy steps of ``smoke``, beside the compiled one."""
SHAPE = (8192, 4096, 14336)
STEPS = 6


class Smoke:
    """The part; the toy steps run eagerly, since compiling all of them would take minutes.

    ``smoke`` has the contenders that ``FEW`` names. ``smoke-all`` has all of them: it finds what crashes in Python,
    which needs no GPU that computes.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def items(self, settings: Settings) -> list[Item]:
        device = settings.torch_device
        everyone = [
            Item(key=TOY_STEP + c.key, seconds=2.0, limit=60.0, needs=c.needs, missing=c.missing(device))
            for c in contenders()
            if c.key in FEW or (self.name == ALL and "whole model" not in c.key)
        ]
        first = [Item(key=key, seconds=2.0, limit=60.0) for key in (SUPPORT, PEAKS)]
        linears = [
            Item(key=LINEAR + name, seconds=2.0, limit=60.0, missing=why_not(name, device))
            for name in (BF16, "torchao tensorwise", "te delayed")
        ]
        compiled = Item(key=f"{TOY_STEP}{MAIN}{COMPILED}", seconds=5.0, limit=90.0)
        return [*first, *linears, *everyone, *([compiled] if settings.compile else [])]

    def run(self, key: str, settings: Settings) -> dict[str, Any]:
        if key == SUPPORT:
            return support(settings.torch_device)
        if key == PEAKS:
            return measure_peaks(settings)
        if key.startswith(LINEAR):
            return linear(key.removeprefix(LINEAR), settings)
        name = key.removeprefix(TOY_STEP)
        return toy_steps(name.removesuffix(COMPILED), settings, compiled=name.endswith(COMPILED))


def support(device: torch.device) -> dict[str, Any]:
    """What our package says runs here, and what Transformer Engine says of each of its recipes."""
    verdicts = survey(device)
    runs = [verdict.name for verdict in verdicts if verdict.runs and not verdict.emulated]
    return {
        "precisions": {v.name: {"runs": v.runs, "emulated": v.emulated, "reason": v.reason} for v in verdicts},
        "transformer_engine": _te_support(),
        "headline": f"{len(runs)} of {len(verdicts)} precisions run on the device itself",
    }


def _te_support() -> dict[str, str]:
    try:
        import transformer_engine.pytorch as te
    except Exception as error:
        return {"import": measure.describe(error)}
    found = {}
    for name in ("fp8", "fp8_block_scaling", "mxfp8", "nvfp4"):
        try:
            found[name] = str(getattr(te, f"is_{name}_available")(return_reason=True))
        except Exception as error:  # without a driver it raises instead of answering
            found[name] = measure.describe(error)
    return found


def linear(name: str, settings: Settings) -> dict[str, Any]:
    """One Linear of one contender."""
    m, k, n = (32, 64, 128) if settings.smoke else SHAPE
    device = settings.torch_device
    run = make(Problem(m=m, k=k, n=n, device=device, compile=settings.compile), name)
    first = measure.seconds(run, device)
    for _ in range(3):
        run()
    row = measure.summary([measure.one(run, device) for _ in range(3 if settings.smoke else 15)])
    headline = f"{row['ms']:.3f} ms at {m} x {k} x {n}, first call {first:.1f} s"
    measure.forget(device)
    return {"m": m, "k": k, "n": n, "first_call_s": first, **row, "headline": headline}


def toy_steps(name: str, settings: Settings, *, compiled: bool) -> dict[str, Any]:
    """A few training steps of a small model."""
    shape = models.TOY if settings.smoke else models.SHAPES["small"]
    device = settings.torch_device
    measure.start_afresh(device)
    running = find(name).setup(Job(shape=shape, device=device, compile=compiled))
    batch = models.batches(shape, 2, device, count=1)
    losses: list[Any] = []
    first = measure.seconds(lambda: losses.append(running.step(batch)), device)
    times, _ = measure.steps(lambda _: losses.append(running.step(batch)), STEPS, device)
    values = [float(loss) for loss in losses]
    row = measure.summary(times)
    layers = len(low_precision_layers(running.bare))
    headline = f"{row['ms']:.2f} ms, loss {values[0]:.3f} -> {values[-1]:.3f}, {layers} FP8 layers"
    if values_exist() and not values[-1] < values[0]:
        raise RuntimeError(f"the loss does not fall: {values}")
    return {"first_step_s": first, **row, "losses": values, "fp8_layers": layers, "headline": headline}
