"""A plan and its costs as text, for a terminal or as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_lowprec.conversion.gains import SOURCE
from lightning_lowprec.conversion.plan import Plan, PlanRow
from lightning_lowprec.tools.planning.costs import Bytes, Flops
from lightning_lowprec.tools.table import format_table

GREEN, YELLOW, DIM, RESET = "\033[32m", "\033[33m", "\033[2m", "\033[0m"
GATHER_NOTE = (
    "all-gather: all weights once, in the dtype in which strategy='fsdp2' gathers them (tensorwise FP8: one byte per"
    " converted weight). Under Lightning's own FSDP2 strategy, bf16-mixed gathers 4 bytes. docs/many-machines.md has"
    " the bytes of a step."
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A plan, and what it means in FLOPs and bytes."""

    title: str
    precision: str
    plan: Plan
    flops: Flops
    bytes: Sequence[Bytes]


def text(report: Report, *, color: bool = False, markdown: bool = False, all_rows: bool = False) -> str:
    """Return the report.

    Args:
        report: the plan and its costs.
        color: colour the layers for a terminal.
        markdown: write Markdown.
        all_rows: one row per layer, not one per kind of block.
    """
    rows = [(row.fqn, row) for row in report.plan.rows] if all_rows else collapse(report.plan.rows)
    cells = [(name or "(the model)", _shape(row), _verdict(row)) for name, row in rows]
    layers = format_table([("layer", "in -> out", "verdict"), *cells], right=[1], markdown=markdown)
    if color:
        layers[1:] = [f"{_tint(row)}{line}{RESET}" for line, (_, row) in zip(layers[1:], rows, strict=True)]
    title = f"{'# ' if markdown else ''}{report.title}: {report.plan.summary()}"
    costs = ("- " if markdown else "") + ("\n- " if markdown else "\n").join(_costs(report))
    sizes = format_table(_sizes(report.bytes), right=range(1, 6), markdown=markdown)
    return "\n\n".join([title, "\n".join(layers), costs, "\n".join(sizes), GATHER_NOTE])


def collapse(rows: Sequence[PlanRow]) -> list[tuple[str, PlanRow]]:
    """Join rows that differ in block numbers only: (how many and the fqn with ``*``, one of the rows)."""
    groups: dict[tuple[object, ...], list[PlanRow]] = {}
    for row in rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", row.fqn)
        groups.setdefault((pattern, row.in_features, row.out_features, row.kept_because, row.trains), []).append(row)
    return [(f"{len(same)} x {key[0]}" if len(same) > 1 else same[0].fqn, same[0]) for key, same in groups.items()]


def _shape(row: PlanRow) -> str:
    return f"{row.in_features} -> {row.out_features}" + (f" x {row.stored}" if row.stored > 1 else "")


def _verdict(row: PlanRow) -> str:
    if row.kept_because is not None:
        return f"kept: {row.kept_because}"
    return "FP8, slower than bf16" if row.gain is None else f"FP8, about {row.gain:.2f}x"


def _tint(row: PlanRow) -> str:
    return DIM if row.kept_because else YELLOW if row.slower else GREEN


def _costs(report: Report) -> list[str]:
    flops = report.flops
    attention = f"{flops.attention:.3g} attention" if flops.attention else "attention not known and not counted"
    lines = [
        f"matrix FLOPs per token: {flops.fp8_share:.1%} in FP8"
        f" ({flops.fp8:.3g} FP8, {flops.high_precision:.3g} kept, {attention})"
    ]
    slow = len(report.plan.below_break_even())
    if slow:
        lines.append(f"{slow} converted layers are expected to be slower than in bf16; `--min-gain=auto` keeps them")
    lines.append(f"gains per layer: {SOURCE}, nearest shape; coarse")
    return lines


def _sizes(rows: Sequence[Bytes]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("with AdamW", "weights", "gradients", "moments", "together", "all-gather")]
    for row in rows:
        sizes = [_size(value) for value in (row.weights, row.gradients, row.optimizer, row.state)]
        lines.append((row.precision, *sizes, _size(row.gathered) if row.gathered else "-"))
    return lines


def _size(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"
