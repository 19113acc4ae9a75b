"""``report.md``: the tables. A pure function of the results; a section that cannot be rendered says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu_lane import figures, part_loss, targets
from benchmarks.gpu_lane.contenders import MAIN_TE
from benchmarks.gpu_lane.figures import Row, number, table
from benchmarks.gpu_lane.kernel_times import CATEGORIES
from benchmarks.gpu_lane.linear_runs import BF16, LIMIT
from benchmarks.gpu_lane.measure import HIDE_LAUNCHES_MS
from benchmarks.gpu_lane.part_linear import PEAKS
from benchmarks.gpu_lane.results import OK, figures_of, means_nothing

Data = dict[str, Any]


def render(data: Data) -> str:
    """The whole report."""
    sections: list[tuple[str, Callable[[Data], str]]] = [
        ("Machine", _machine), ("Targets", _targets), ("Peak rates", _peaks), ("Linear layers", _linear),
        ("Training steps, 8B-shaped stack", _steps), ("What the GPU did in a step", _kernels), ("Memory", _memory),
        ("Losses, 124M parameters", part_loss.section), ("Missing, failed, not reached", _gaps),
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
    text = [targets.faster_backend(data), _verdicts(targets.targets(data))]
    if MAIN_TE in figures.comparable(data, "step8b"):
        text += ["The same of Transformer Engine's layers:", _verdicts(targets.of_the_stack(data, MAIN_TE))]
    return "\n\n".join(text)


def _verdicts(found: list[Data]) -> str:
    words = {True: "reached", False: "**not reached**", None: "not measured"}
    rows = [(t["target"], number(t["measured"], 3), f"{t['sign']} {t['wanted']:g}", words[t["met"]]) for t in found]
    return table(("what", "value", "target", ""), rows)


def _peaks(data: Data) -> str:
    rates = figures_of(data, "linear").get(PEAKS, {}).get("rates", {})
    rows = ((name, number(rate / 1e12, 3)) for name, rate in rates.items())
    named = table(("rate (M x N x K)", "10^12 FLOP/s or bytes/s"), rows)
    return named and f"Products of the 8B-shaped step; backward ones (dgrad, wgrad) lie as in a step.\n\n{named}"


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


def _steps(data: Data) -> str:
    everyone, steps = figures_of(data, "step8b"), figures.comparable(data, "step8b")
    if not steps:
        return ""
    any_step = next(iter(steps.values()))
    best, rows = figures.best_bf16(steps), figures.linear_rows(data)
    lines = [_step_line(name, step, steps, best, rows) for name, step in steps.items()]
    head = (
        "contender", "tokens/s", "ms", "over bf16-mixed, compiled", "over the best bf16", "bound",
        f"loss after {any_step['steps']}", "peak GB", "FP8 share", "matrix TFLOP/s", "first step s",
    )  # fmt: skip
    others = [f"{name} (layers, tokens: {figures.size(f)})" for name, f in everyone.items() if name not in steps]
    return "\n\n".join(filter(None, (
        f"{any_step['layers']} layers, {any_step['parameters'] / 1e9:.2f} billion parameters, {any_step['tokens']}"
        f" tokens per step (batch {any_step['batch']}): forward, loss, backward, fused AdamW; median of the timed"
        " steps, compilation apart (in the first step, from the compiler's cache where an earlier contender had the"
        f" same code). The best bf16 of Lightning's own: {best}. The bound says what the linear table of the same run"
        " allows over bf16-mixed, compiled (of FP8 with bf16 weights: over bf16-true, compiled); it needs every shape"
        " of the step in that table, with weights of the same dtype. `FP8 share` is of the FLOPs of all matrix"
        " products, attention included.",
        table(head, lines),
        f"Of another size, so not compared: {', '.join(others)}." if others else "",
    )))  # fmt: skip


def _step_line(name: str, step: Data, steps: dict[str, Data], best: str | None, rows: Any) -> Row:
    base = steps.get(figures.counterpart(step))
    bound = None if base is None else figures.amdahl(step, base["ms"], rows)
    return (
        name, f"{step['tokens_per_s']:.0f}", number(step["ms"]), number(figures.speedups(steps).get(name)),
        number(figures.speedups(steps, best or "").get(name)), number(bound), number(step["losses"][-1], 4),
        number(step["peak_bytes"] / 1e9 if "peak_bytes" in step else None, 1), number(step["fp8_share"]),
        number(step["matrix_tflops"], 1), number(step["first_step_s"], 1),
    )  # fmt: skip


def _kernels(data: Data) -> str:
    rows = [
        (
            name, number(f["profile"]["kernels"], 0),
            *(number(ms) for ms in f["profile"]["gpu_ms"].values()), number(f["profile"]["busy_ms"]),
            f.get("attention"),
        )
        for name, f in figures_of(data, "step8b").items()
        if "kernels" in f.get("profile", {})
    ]  # fmt: skip
    head = ("contender", "kernels", *(f"{kind}, ms" for kind in CATEGORIES), "GPU busy, ms", "attention by")
    text = table(head, rows)
    return text and f"Per step, by torch's profiler after the timed steps.\n\n{text}"


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
