"""Write the rows of ``worlds`` as Markdown: what is sent, what is held, and what runs around a gather."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_lowprec.tools.output import format_table

WIRE = ("all_gather", "reduce_scatter", "all_reduce", "scales")
ALL_LAYERS = 32
"""The layers of the smallest model; the other cases have fewer."""
INTRO = """# Worlds of many GPUs: counted, not timed

Device: {device}. Versions: {versions}.

Rank 0 of each world; the other ranks are torch's fake process group. One sequence of {tokens} tokens per rank, fused
AdamW, Llama 3's shapes. Blocks are not compiled; activations are recomputed per block. A GB has 10^9 bytes.
"""
SENT = """## Sent per rank and step (GB)

A ring's bytes. `=` behind a figure: the count equals the formula of docs/fsdp2.md to the
byte. Shards: x copies x ranks of a tensor-parallel group. Scales in bytes. Other: all-reduces that no formula
promises, of activations under tensor parallelism, and of the amax history of Transformer Engine's delayed scaling.
"""
HELD = """## Held per rank (GB)

State: weights, gradients, moments, masters and the kept codes of float8 shards after a backward pass; beside it what
`lowprec plan --shards` promises.
Peaks of the caching allocator: of the set-up, of forward and backward (the state, weights and gradients in flight,
activations, logits), of the optimizer's step. In flight: the plan's bound, without activations. Reserved: with what the
allocator keeps for each of FSDP2's streams.
"""
AROUND = """## Around the collectives

Kernels per gather or reduction, and bytes that all operations read and write, as a multiple of: copy in (codes or casts
of the shards, and the buffer that is sent), what this rank puts into the gathers; copy out (whole weights from the
buffer), what the gathers return; reduce (the buffer of gradients), what goes into the reductions. Scales: kernels, once
per step.
"""


def markdown(page: Mapping[str, Any]) -> str:
    """Return the page of all rows of ``worlds.json``."""
    rows = page["rows"]
    versions = ", ".join(f"{name} {number}" for name, number in page["versions"].items())
    tokens = ", ".join(str(t) for t in sorted({row["tokens"] for row in rows}))
    parts = [
        INTRO.format(device=page["device"], versions=versions, tokens=tokens),
        SENT,
        _table(("GPUs", "shards", "all-gather", "reduce-scatter", "all-reduce", "scales", "other"), rows, _sent),
        HELD,
        _table(
            ("GPUs", "shards", "state", "plan", "at rest", "set-up", "step", "in flight", "optimizer", "reserved"),
            rows,
            _held,
        ),
        AROUND,
        _table(("GPUs", "shards", "gathers", "copy in", "", "copy out", "", "reduce", "", "scales"), rows, _around),
    ]
    return "\n".join(parts)


def summary(page: Mapping[str, Any]) -> list[str]:
    """Return the lines of a short table for the docs: the cases with all layers."""
    lines: list[tuple[str, ...]] = [
        (
            "model",
            "GPUs",
            "precision",
            "all-gather",
            "reduce-scatter",
            "state",
            "promised",
            "set-up",
            "step",
            "optimizer",
        )
    ]
    for row in page["rows"]:
        if row["layers"] < ALL_LAYERS:
            continue
        cells = [row["outcome"], *[""] * 6]
        if row["outcome"] == "ok":
            wire, memory = row["wire"], row["memory"]
            peaks = (memory[name] for name in ("setup_peak", "backward_peak", "optimizer_peak"))
            sizes = (wire["all_gather"], wire["reduce_scatter"], memory["state"], row["promised"]["state"], *peaks)
            cells = [f"{size / 1e9:.1f}" for size in sizes]
        elif row["promised"]:
            cells[3] = f"{row['promised']['state'] / 1e9:.1f}"
        lines.append((row["shape"].upper(), str(row["world"]), row["precision"], *cells))
    return format_table(lines, right=(1, *range(3, 10)), markdown=True)


def _table(titles: Sequence[str], rows: Sequence[Mapping[str, Any]], cells: Any) -> str:
    lines = [("model", "precision", *titles)]
    for row in rows:
        sizes = cells(row) if row["outcome"] == "ok" else _absent(row, len(titles) - 2)
        shards = row["world"] // row["copies"] // row["tensor"]
        split = f"{shards} x {row['copies']} x {row['tensor']}"
        lines.append((_model(row), row["precision"], str(row["world"]), split, *sizes))
    return "\n".join(format_table(lines, right=range(2, len(lines[0])), markdown=True)) + "\n"


def _model(row: Mapping[str, Any]) -> str:
    return f"{row['shape']}, {row['layers']} layers"


def _absent(row: Mapping[str, Any], width: int) -> Iterator[str]:
    yield row["outcome"]
    yield from [""] * (width - 1)


def _sent(row: Mapping[str, Any]) -> Iterator[str]:
    for kind in WIRE:
        counted, formula = row["wire"][kind], expected(row, kind)
        equal = "" if formula is None else " =" if abs(counted - formula) < 1 else f" ({_gb(formula)})"
        size = f"{counted:.0f}" if kind == "scales" else _gb(counted)
        yield f"{size}{equal}" if counted or formula else "-"
    other = row["wire"]["other"]
    yield "-" if not other else _gb(other) if other >= 1e7 else f"{other:.0f} bytes"


def expected(row: Mapping[str, Any], kind: str) -> float | None:
    """Return the formula's bytes of one kind of collective; None: nothing was promised."""
    if not (promised := row["promised"]):
        return None
    if kind == "all_gather":
        return float(promised["all_gather_forward"] + promised["all_gather_backward"])
    return float(promised[kind])


def _held(row: Mapping[str, Any]) -> Iterator[str]:
    memory, promised = row["memory"], row["promised"]
    yield _gb(memory["state"])
    yield _gb(promised["state"]) if promised else "-"
    for name in ("at_rest", "setup_peak", "backward_peak"):
        yield _gb(memory[name])
    yield _gb(promised["in_flight"]) if promised else "-"
    for name in ("optimizer_peak", "reserved"):
        yield _gb(memory[name])


def _around(row: Mapping[str, Any]) -> Iterator[str]:
    stages, wire = row["stages"], row["collectives"]
    shards = row["world"] // row["copies"] // row["tensor"]
    whole = row["wire"]["all_gather"] * shards / max(shards - 1, 1)
    gradients = row["wire"]["reduce_scatter"] * shards / max(shards - 1, 1)
    yield str(wire["all_gather"])
    for stage, calls, size in (
        ("copy in", wire["all_gather"], whole / shards),
        ("copy out", wire["all_gather"], whole),
        ("reduce", wire["reduce_scatter"], gradients),
    ):
        yield f"{stages[stage]['kernels'] / max(calls, 1):.1f}"
        yield f"{stages[stage]['bytes'] / size:.1f}x" if size else "-"
    yield str(stages["scales"]["kernels"])


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g}" if size < 1e10 else f"{size / 1e9:.1f}"
