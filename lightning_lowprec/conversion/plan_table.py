"""The rows of a plan as a table: as text, and as HTML for notebooks.

Rows that differ in block numbers only are one line, so that a model of 1,000 layers stays readable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_lowprec import html
from lightning_lowprec.conversion.gains import SOURCE
from lightning_lowprec.conversion.plan_row import PlanRow


def grouped(rows: Sequence[PlanRow]) -> list[tuple[str, PlanRow]]:
    """Join rows that differ in block numbers only: (how many and the fqn with ``*``, one of the rows)."""
    groups: dict[tuple[object, ...], list[PlanRow]] = {}
    for row in rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", row.fqn)
        groups.setdefault(
            (pattern, row.in_features, row.out_features, row.kept_because, row.trains, row.recipe), []
        ).append(row)
    return [(f"{len(same)} x {key[0]}" if len(same) > 1 else same[0].fqn, same[0]) for key, same in groups.items()]


def verdict(row: PlanRow, format: str) -> str:
    """Return the format or the reason of a row, without the expected gain."""
    if row.kept_because is not None:
        return row.kept
    said = format if row.recipe is None else f"{format} ({row.recipe})"
    return f"{said}, {row.padding}" if row.padded_to else said


def verdict_with_gain(row: PlanRow, format: str) -> str:
    """Return the format and the expected gain of a row, or the reason why the weight is kept."""
    said = verdict(row, format)
    if row.kept_because is not None or format != "FP8":
        return said
    return f"{said}, slower than bf16" if row.gain is None else f"{said}, about {row.gain:.2f}x"


def as_text(rows: Sequence[tuple[str, PlanRow]], format: str) -> str:
    """Return one aligned line per (name, row)."""
    if not rows:
        return "(the model has no Linear)"
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {row.shape:>16}  {verdict(row, format)}" for name, row in rows)


def as_html(summary: str, rows: Sequence[PlanRow], format: str) -> str:
    """Return the summary, the table with one row per kind of block, and the source of the gains.

    Args:
        summary: one line about the plan.
        rows: all rows of the plan.
        format: the format of the weights that convert, in words.
    """
    if not rows:
        return html.paragraph("The model has no Linear.")
    cells = [(name or "(the model)", row.shape, verdict_with_gain(row, format)) for name, row in grouped(rows)]
    note = f"gains per layer: {SOURCE}, nearest shape; coarse"
    if format != "FP8":
        note = f"gains per layer: not known for {format}"
    return "".join(
        [
            html.paragraph(summary, bold=True),
            html.table([("layer", "in -> out", "verdict"), *cells], right=[1]),
            html.small(note),
        ]
    )
