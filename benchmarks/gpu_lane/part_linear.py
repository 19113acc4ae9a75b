"""``linear``: one Linear, forward and backward, by shape and recipe; ratio to bf16 and to the limit."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_lane import measure
from benchmarks.gpu_lane.item import Item, stage
from benchmarks.gpu_lane.linear_runs import BF16, FEWER, NAMES, OF_STEPS, Problem, make, why_not
from benchmarks.gpu_lane.models import step_tokens
from benchmarks.gpu_lane.rates import rates
from benchmarks.gpu_lane.results import FAILED, MISSING, OK
from benchmarks.gpu_lane.settings import Settings

PEAKS = "peaks"
LLAMA_8B = ((4096, 14336), (14336, 4096), (4096, 4096), (4096, 1024))
LLAMA_70B = ((8192, 28672), (28672, 8192), (8192, 8192), (8192, 1024))
SMALL = ((1024, 2048, 1024), (2048, 1024, 1024), (4096, 2048, 2048), (8192, 1024, 4096), (8192, 2048, 8192))
LARGE = ((8192, 8192, 28672), (8192, 8192, 8192))
TOY_SHAPES = ((32, 64, 128), (32, 128, 64))
VALUABLE = 4
"""So many shapes, those of the 8B-shaped step, have every recipe; others leave out the least used compiled one."""
ALL_STEPS = 9
"""The shapes of the step are among so many."""
SAMPLE_SECONDS = 0.3
"""Time for the samples of one contender at one shape."""


def shapes(settings: Settings) -> list[tuple[int, int, int]]:
    """(M, K, N), the most valuable first: what the 8B-shaped step is made of, the 8192 class, small ones.

    M is that of the step on this device, without which there is no bound on them; then others.
    """
    if settings.smoke:
        return list(TOY_SHAPES)
    tokens = step_tokens(settings)
    first = [*((tokens, k, n) for k, n in LLAMA_8B), *LARGE, *SMALL[:3]]
    further = [(m, k, n) for m in (8192, 16384) for k, n in (*LLAMA_8B, *LLAMA_70B)]
    return list(dict.fromkeys([*first, *further[4:8], *SMALL[3:], *further]))


class Linears:
    """The part."""

    name = "linear"

    def items(self, settings: Settings) -> list[Item]:
        keys = [PEAKS, *(f"{m}x{k}x{n}" for m, k, n in shapes(settings))]
        return [Item(key=key, seconds=_wants(key, settings), limit=120.0) for key in keys]

    def run(self, key: str, settings: Settings) -> dict[str, Any]:
        if key == PEAKS:
            return measure_peaks(settings)
        m, k, n = map(int, key.split("x"))
        return measure_shape(m, k, n, settings)


def columns(shape: tuple[int, int, int], settings: Settings) -> tuple[str, ...]:
    """Who is measured at a shape: everyone at the first ones, float32 weights at those of the steps."""
    listed = shapes(settings)
    index = listed.index(shape) if shape in listed else len(listed)
    of_step = settings.smoke or (shape[1:] in LLAMA_8B and index < ALL_STEPS)
    return (*(NAMES if index < VALUABLE else FEWER), *(OF_STEPS if of_step else ()))


def _wants(key: str, settings: Settings) -> float:
    """Seconds that an item takes at most, compilation of its recipes included."""
    if settings.smoke:
        return 2.0
    first = [f"{m}x{k}x{n}" for m, k, n in shapes(settings)[:ALL_STEPS]]
    return 35.0 if key in first else 20.0


def measure_peaks(settings: Settings) -> dict[str, Any]:
    """The named rates of this device (see ``rates``)."""
    found = rates(settings)
    measure.forget(settings.torch_device)
    return {**found, "headline": f"{len(found['rates'])} named rates, {len(found['rates_failed'])} failed"}


def measure_shape(m: int, k: int, n: int, settings: Settings) -> dict[str, Any]:
    """Every contender at one shape, set up and warmed one by one, then timed in turn."""
    device = settings.torch_device
    measure.start_afresh(device)
    problem = Problem(m=m, k=k, n=n, device=device, compile=settings.compile)
    rows: dict[str, dict[str, Any]] = {}
    runs = {}
    for name in columns((m, k, n), settings):
        stage(f"set up {name}")
        reason = why_not(name, device)
        if reason is not None:
            rows[name] = {"status": MISSING, "reason": reason}
            continue
        try:
            run = make(problem, name)
            first = measure.seconds(run, device)
            warm = [measure.seconds(run, device) * 1e3 for _ in range(2 if settings.smoke else 5)]
        except Exception as error:
            rows[name] = {"status": FAILED, "reason": measure.describe(error)}
        else:
            runs[name] = run
            rows[name] = {"first_call_s": first, "warm_ms": min(warm)}
    stage("timing")
    _time(runs, rows, settings)
    runs.clear()
    measure.start_afresh(device)
    return {"m": m, "k": k, "n": n, "runs": rows, "headline": _headline(rows)}


def _time(runs: dict[str, Any], rows: dict[str, dict[str, Any]], settings: Settings) -> None:
    """Device time, in turn."""
    device = settings.torch_device
    slowest = max((rows[name]["warm_ms"] for name in runs), default=1.0)
    rounds = 3 if settings.smoke else measure.rounds_within(slowest, SAMPLE_SECONDS, 10, 40)
    hosts = {name: min(measure.host_ms(run, device) for _ in range(3)) for name, run in runs.items()}
    samples, failed = measure.in_turn(runs, device, rounds, hosts)
    for name, reason in failed.items():
        rows[name] = {"status": FAILED, "reason": reason}
    for name, taken in samples.items():
        rows[name] |= {"status": OK, **measure.summary(taken)}
        rows[name] |= {"host_ms": hosts[name], "sleep_ms": measure.sleep_ms(hosts[name])}


def _headline(rows: dict[str, dict[str, Any]]) -> str:
    base = rows.get(BF16, {}).get("ms")
    if base is None:
        return "no bf16 figure"
    return ", ".join(
        f"{name} {row['ms']:.3f} ms ({base / row['ms']:.2f}x)" if "ms" in row else f"{name} {row['status']}"
        for name, row in rows.items()
    )
