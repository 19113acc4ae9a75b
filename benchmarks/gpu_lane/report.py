"""``report.md``: the tables. A pure function of the results; a section that cannot be rendered says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu_lane import figures, targets
from benchmarks.gpu_lane.contenders import MAIN
from benchmarks.gpu_lane.convergence_report import convergence
from benchmarks.gpu_lane.kernel_times import CATEGORIES
from benchmarks.gpu_lane.linear_runs import BF16, LIMIT
from benchmarks.gpu_lane.markdown import Row, number, table
from benchmarks.gpu_lane.measure import HIDE_LAUNCHES_MS
from benchmarks.gpu_lane.part_linear import PEAKS
from benchmarks.gpu_lane.part_optimizer import CALLS
from benchmarks.gpu_lane.results import OK, figures_of, means_nothing

Data = dict[str, Any]


def render(data: Data) -> str:
    """The whole report."""
    sections: list[tuple[str, Callable[[Data], str]]] = [
        ("Machine", _machine), ("Targets", _targets), ("Peak rates", _peaks), ("Linear layers", _linear),
        ("Training steps, 8B-shaped stack", lambda d: _steps(d, "step8b")),
        ("Training steps, 1B model", lambda d: _steps(d, "step1b")), ("What the GPU did in a step", _kernels),
        ("Host overhead", _overhead),
        ("Memory", _memory), ("Optimizer steps", _optimizer), ("Gradient accumulation", _accumulation),
        ("Convergence, 124M parameters", convergence),
        ("Smoke", lambda d: _smoke(d, "smoke")), ("Smoke, all contenders", lambda d: _smoke(d, "smoke-all")),
        ("GPU tests", _tests),
        ("Missing, failed, not reached", _gaps),
    ]  # fmt: skip
    text = ["# GPU lane"]
    for why in dict.fromkeys(filter(None, map(means_nothing, data["runs"]))):
        text.append(f"**Of {why}: shows that everything runs; no figure here means anything.**")
    for title, section in sections:
        try:
            body = section(data)
        except Exception as error:  # figures of another version, or cut short
            body = f"(could not be rendered: {type(error).__name__}: {error})"
        if body:
            text.append(f"## {title}\n\n{body}")
    return "\n\n".join(text) + "\n"


def _machine(data: Data) -> str:
    rows = []
    for run in data["runs"]:
        machine = run["machine"]
        versions = ", ".join(f"{name} {v}" for name, v in machine.get("versions", {}).items() if v)
        memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if "memory_bytes" in machine else "-"
        rows.append((
            run["date"], machine.get("device"), machine.get("driver") or "-", memory, run["commit"],
            f"python {machine.get('python')}, CUDA {machine.get('cuda') or '-'}, {versions}", " ".join(run["parts"]),
        ))  # fmt: skip
    return table(("date", "device", "driver", "memory", "commit", "versions", "parts"), dict.fromkeys(rows))


def _targets(data: Data) -> str:
    meant = targets.fp8_hybrid(data)
    text = [
        f"`fp8-hybrid` is `{meant.removeprefix('ours ')}` on this machine.",
        targets.faster_backend(data),
        _verdicts(targets.targets(data)),
    ]
    if meant != MAIN:
        text += ["The same of torchao's, beside it:", _verdicts(targets.of_the_stack(data, MAIN))]
    return "\n\n".join(text)


def _verdicts(found: list[Data]) -> str:
    words = {True: "reached", False: "**not reached**", None: "not measured"}
    rows = [(t["target"], number(t["measured"], 3), f"{t['sign']} {t['wanted']:g}", words[t["met"]]) for t in found]
    return table(("what", "value", "target", ""), rows)


def _peaks(data: Data) -> str:
    found = next(filter(None, (figures_of(data, part).get(PEAKS) for part in ("linear", "smoke", "smoke-all"))), None)
    if found is None:
        return ""
    size = found["n"]
    text = table(("product", "TFLOP/s"), ((name, number(rate, 1)) for name, rate in found["tflops"].items()))
    named = table(
        ("rate (M x N x K)", "10^12 FLOP/s or bytes/s"),
        ((name, number(rate / 1e12, 3)) for name, rate in found.get("rates", {}).items()),
    )
    rest = "The rates that the 8B-shaped step is made of; backward products (dgrad, wgrad) lie as in a step:"
    return f"{size} x {size} x {size}, random data, median of 20.\n\n{text}" + (
        f"\n\n{rest}\n\n{named}" if named else ""
    )


def _linear(data: Data) -> str:
    rows = figures.linear_rows(data)
    if not rows:
        return ""
    names = [name for name in dict.fromkeys(n for row in rows.values() for n in row["runs"]) if name != BF16]
    ratio = table(
        ("M", "K", "N", "bf16 ms", *names),
        (
            (*shape, number(figures.times(row).get(BF16), 3), *(_cell(row, name) for name in names))
            for shape, row in rows.items()
        ),
    )
    text = [
        "Forward and backward of one bias-free Linear, bf16 weights unless the column says float32: milliseconds on the"
        " device, and (in brackets) how many times faster than bf16 with weights of the same dtype (below 1: slower)."
        f" `{LIMIT}`: the three GEMMs on operands that are FP8 already.",
        ratio,
        _losers(rows),
        _not_hidden(rows),
        "The same in a loop over the layer alone, the host's launches included (bf16 = 1):",
        table(("M", "K", "N", *names), ((*s, *_loop_cells(row, names)) for s, row in rows.items())),
    ]
    peak = figures.peak_tflops(data)
    if peak is not None:
        text += [
            f"Share of the peak rate of `torch._scaled_mm` ({peak:.0f} TFLOP/s):",
            table(
                ("M", "K", "N", BF16, *names),
                ((*s, *_limit_cells(row, [BF16, *names], peak)) for s, row in rows.items()),
            ),
        ]
    return "\n\n".join(filter(None, text))


def _losers(rows: dict[figures.Shape, Data]) -> str:
    """Where FP8 is no gain."""
    best = {
        shape: max((r for name, r in figures.ratios(row).items() if not name.startswith((BF16, LIMIT))), default=None)
        for shape, row in rows.items()
    }
    slower = [" x ".join(map(str, shape)) for shape, ratio in best.items() if ratio is not None and ratio < 1]
    return f"Slower than bf16 in every recipe that ran: {', '.join(slower) or 'no shape'}."


def _not_hidden(rows: dict[figures.Shape, Data]) -> str:
    """Whose device time has the host's launches in it."""
    slow = [
        f"{name} at {' x '.join(map(str, shape))} ({run['host_ms']:.1f} ms)"
        for shape, row in rows.items()
        for name, run in row["runs"].items()
        if run.get("host_ms", 0.0) > run.get("sleep_ms", HIDE_LAUNCHES_MS)
    ]
    if not slow:
        return ""
    return (
        "Launched by the host in more time than the device was held back, so that some of it may be in the times:"
        f" {', '.join(slow)}."
    )


def _cell(row: Data, name: str) -> str:
    ms, ratio = figures.times(row).get(name), figures.ratios(row).get(name)
    if ms is None:
        return str(row["runs"].get(name, {}).get("status", "-"))
    return f"{ms:.3f} ({number(ratio)}x)"


def _loop_cells(row: Data, names: list[str]) -> list[str]:
    found = figures.ratios(row, "loop_ms")
    return [number(found.get(name)) for name in names]


def _limit_cells(row: Data, names: list[str], peak: float) -> list[str]:
    found = figures.of_limit(row, peak)
    return [f"{found[name]:.0%}" if name in found else "-" for name in names]


def _steps(data: Data, part: str) -> str:
    everyone, steps = figures_of(data, part), figures.comparable(data, part)
    if not steps:
        return ""
    any_step = next(iter(steps.values()))
    best, rows = figures.best_bf16(steps), figures.linear_rows(data)
    lines = [_step_line(name, step, steps, best, rows) for name, step in steps.items()]
    head = (
        "contender", "tokens/s", "ms", "over bf16-mixed, compiled", "over the best bf16", "bound by time",
        "bound by FLOPs", f"loss after {any_step['steps']}", "peak GB", "FP8 share", "matrix TFLOP/s", "first step s",
    )  # fmt: skip
    others = [f"{name} (layers, tokens: {figures.size(f)})" for name, f in everyone.items() if name not in steps]
    return "\n\n".join(filter(None, (
        f"{any_step['layers']} layers, {any_step['parameters'] / 1e9:.2f} billion parameters, {any_step['tokens']}"
        f" tokens per step (batch {any_step['batch']}): forward, loss, backward, fused AdamW; median of the timed"
        " steps, compilation apart (in the first step, from the compiler's cache where an earlier contender had the"
        f" same code). The best bf16 of Lightning's own: {best}. The bounds say what the linear table of the same run"
        " allows over bf16-mixed, compiled (of FP8 with bf16 weights: over bf16-true, compiled); they need every shape"
        " of the step in that table, with weights of the same dtype. `FP8 share` is of the FLOPs of all matrix"
        " products, attention included.",
        table(head, lines),
        f"Of another size, so not compared: {', '.join(others)}." if others else "",
    )))  # fmt: skip


def _step_line(name: str, step: Data, steps: dict[str, Data], best: str | None, rows: Any) -> Row:
    base = steps.get(figures.counterpart(step))
    by_time = None if base is None else figures.amdahl_by_time(step, base["ms"], rows)
    return (
        name, f"{step['tokens_per_s']:.0f}", number(step["ms"]), number(figures.speedups(steps).get(name)),
        number(figures.speedups(steps, best or "").get(name)), number(by_time),
        number(figures.amdahl_by_flops(step, rows)), number(step["losses"][-1], 4),
        number(step["peak_bytes"] / 1e9 if "peak_bytes" in step else None, 1), number(step["fp8_share"]),
        number(step["matrix_tflops"], 1), number(step["first_step_s"], 1),
    )  # fmt: skip


STATE = ("sm_mhz", "sm_mhz_min", "watts", "celsius")


def _kernels(data: Data) -> str:
    rows = [
        (
            f"{part}: {name}", number(f["profile"]["kernels"], 0),
            *(number(ms) for ms in f["profile"]["gpu_ms"].values()), number(f["profile"]["busy_ms"]),
            f.get("attention"), *(number(f.get("device_state", {}).get(field), 0) for field in STATE),
        )
        for part in ("step8b", "step1b")
        for name, f in figures_of(data, part).items()
        if "kernels" in f.get("profile", {})
    ]  # fmt: skip
    head = ("contender", "kernels", *(f"{kind}, ms" for kind in CATEGORIES), "GPU busy, ms", "attention by",
            "SM MHz", "least", "W", "C")  # fmt: skip
    text = table(head, rows)
    return text and (
        "Per step, by torch's profiler after the timed steps; clocks, power and temperature by nvidia-smi while the"
        f" steps were timed, medians.\n\n{text}"
    )


def _overhead(data: Data) -> str:
    found = figures_of(data, "overhead")
    rows = [
        (name, f["layers"], number(f["ours"]["ms"], 3), number(f["by_hand"]["ms"], 3), number(f["added_ms"], 3))
        for name, f in found.items()
        if "added_ms" in f
    ]
    fields = {"host_ms": 3, "operations_ms": 3, "operations": 1}
    kinds = ("ours", "by_hand", "added")
    profiled = [
        (name, *(number(f[kind][field], digits) for field, digits in fields.items() for kind in kinds))
        for name, f in found.items()
        if "added" in f
    ]  # fmt: skip
    head = [f"{what}, {who}" for what in ("host ms", "ms in operations", "operations")
            for who in ("ours", "by hand", "added")]  # fmt: skip
    return "\n\n".join(filter(None, (
        "Per step, against the same torchao code by hand, nothing compiled, of linears so small that the host is what"
        " takes the time.",
        table(("loop", "linears", "ours, ms", "torchao by hand, ms", "added ms"), rows),
        "By torch's profiler, whose own cost is in both, so only the difference counts:" if profiled else "",
        table(("loop", *head), profiled),
    ))) if found else ""  # fmt: skip


def _memory(data: Data) -> str:
    names = {"weights": "weights", "gradients": "gradients", "masters": "masters", "optimizer": "moments",
             "other": "other"}  # fmt: skip
    rows = [
        (
            key, *(number(f["bytes_per_parameter"].get(name)) for name in names),
            number(f["state_bytes_per_parameter"]), number(f["activation_bytes_per_token"] / 1e3, 1),
        )
        for key, f in figures_of(data, "memory").items()
    ]  # fmt: skip
    text = table(("precision and optimizer", *(f"{n}, bytes/parameter" for n in names.values()),
                  "sum of the first four", "activations, kB/token"), rows)  # fmt: skip
    return text and (
        "Moments are all tensors of the optimizer's state; `other` is what else stays allocated between steps."
        " Activations are what autograd holds at the end of the forward: casts of the weights, which autocast and FP8"
        f" make once per step, are in them.\n\n{text}"
    )


def _optimizer(data: Data) -> str:
    found = figures_of(data, "optimizer")
    if not found:
        return ""
    steps = {key: f for key, f in found.items() if key != CALLS}
    rows = [
        (
            key, number(f["ours"]["ms"]), number(f["plain"]["ms"]), number(f["ratio"], 3),
            *(number(f[name]["host_ms"]) for name in ("ours", "plain")),
            *(number(f[name].get(field)) for field in ("rest_bytes_per_parameter", "peak_bytes_per_parameter")
              for name in ("ours", "plain")),
        )
        for key, f in steps.items()
    ]  # fmt: skip
    counted = [(key, *row.values()) for key, row in found[CALLS]["more_than_plain"].items()] if CALLS in found else []
    sizes = next(iter(found[CALLS]["calls"].values())) if CALLS in found else ()
    text = "".join(
        f"One AdamW step of {f['parameters'] / 1e9:.2f} billion parameters in {f['tensors']} tensors on masters, and"
        " plain on float32 weights; medians, without the backward."
        for f in list(steps.values())[:1]
    )
    head = ("masters, implementation", "ours ms", "plain ms", "ratio", "ours, host ms", "plain, host ms",
            "ours at rest, bytes/parameter", "plain", "ours at most in the step", "plain")  # fmt: skip
    more = table(("aten calls more than plain", *(f"{n} tensors" for n in sizes)), counted)
    return "\n\n".join(filter(None, (text, table(head, rows), more)))


def _accumulation(data: Data) -> str:
    rows = [
        (key, count, number(row["ms"]), number(row["ms_per_micro_batch"]), f"{row['tokens_per_s']:.0f}")
        for key, found in figures_of(data, "accumulation").items()
        for count, row in found["rows"].items()
    ]
    return table(("contender", "micro-batches", "ms per step", "ms per micro-batch", "tokens/s"), rows)


def _smoke(data: Data, part: str) -> str:
    return table(("item", "found"), ((key, f.get("headline", "")) for key, f in figures_of(data, part).items()))


def _tests(data: Data) -> str:
    found = figures_of(data, "tests")
    text = table(("file", "outcome"), ((key, f["headline"]) for key, f in found.items()))
    bad = [
        (name, f["reasons"].get(name, ""))
        for f in found.values()
        for name, outcome in f["outcomes"].items()
        if outcome in ("failed", "error")
    ]
    measured = [
        (name, ", ".join(f"{what} {value}" for what, value in values.items()).replace("|", "/")[:300])
        for f in found.values()
        for name, values in f.get("measured", {}).items()
    ]
    return "\n\n".join(filter(None, (text, table(("failed", "reason"), bad), table(("test", "measured"), measured))))


def _gaps(data: Data) -> str:
    rows = [
        (part, key, entry)
        for part, found in data["parts"].items()
        for key, entry in found["items"].items()
        if entry["status"] != OK
    ]
    rows += [
        (f"linear {key}", name, run)
        for key, found in figures_of(data, "linear").items()
        for name, run in found.get("runs", {}).items()
        if run.get("status") != OK
    ]
    where: dict[tuple[str, str, str], list[str]] = {}
    for part, key, entry in rows:
        reason = " ".join(str(entry.get("reason", "")).replace("|", "/").split())[:300]
        where.setdefault((key, entry["status"], reason), []).append(part)
    lines = ((key, status, reason, ", ".join(parts)) for (key, status, reason), parts in where.items())
    return table(("item", "", "reason", "in"), lines) or "None."
