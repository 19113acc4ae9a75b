"""The rows of a plan: a weight of the model each, and their table as text, and as HTML for notebooks.

Rows that differ in block numbers only are one line of a table, so that a model of 1,000 layers stays readable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_lowprec import html
from lightning_lowprec.conversion.experts import is_stack
from lightning_lowprec.conversion.gains import SOURCE
from lightning_lowprec.conversion.in_place import own_class
from lightning_lowprec.conversion.matmuls import Matmul
from lightning_lowprec.conversion.recipe_map import FLOAT32

_MAYBE_FLOAT32 = ("router", "gate beside experts")
"""Layers that many models run in float32, outside of autocast, as ``selection.built_in`` calls them."""


@dataclass(frozen=True, kw_only=True)
class PlanRow(Matmul):
    """One weight of the model, and whether the weight converts."""

    kept_because: str | None
    """The reason why the weight stays in high precision; None: the weight converts."""
    gain: float | None
    """Expected speed of FP8 over bf16 for this shape (see ``gains``); None: slower than bf16."""
    trains: bool
    """Whether the weight has a gradient: a frozen weight skips the GEMM of the weight gradient."""
    recipe: str | None = None
    """With recipes per layer, the recipe of a weight that converts, in words; None: one recipe for all."""
    padded_to: tuple[int, int] | None = None
    """In and out features with the zeros that ``pad_inner_dim`` appends, whether on or not; None: it appends none."""
    runs_in: str | None = None
    """The dtype in which a kept weight multiplies: ``"bf16"``; None: the weight converts, or the model decides."""

    @property
    def slower(self) -> bool:
        """Whether FP8 is expected to lose against bf16 at this shape."""
        return self.gain is None or self.gain < 1.0

    @property
    def kept(self) -> str:
        """The reason and the dtype of a kept weight: ``kept: output head (by name), bf16``."""
        text = f"kept: {self.kept_because}{f', {self.runs_in}' if self.runs_in else ''}"
        return f"{text} (`pad_inner_dim=True`: {self.padding})" if self.padded_to else text

    @property
    def padding(self) -> str:
        """The zeros of ``pad_inner_dim`` and their cost in words: ``padded to 304 -> 304, 2.7% more FLOPs``."""
        if self.padded_to is None:
            return ""
        wide, high = self.padded_to
        more = wide * high / (self.in_features * self.out_features) - 1
        return f"padded to {wide} -> {high}, {more:.1%} more FLOPs"

    @property
    def shape(self) -> str:
        """The shape in words: ``4096 -> 11008``, of stacked experts ``4096 -> 11008 x 8``."""
        return f"{self.in_features} -> {self.out_features}" + (f" x {self.stored}" if self.stored > 1 else "")


def runs_in(matmul: Matmul, module: nn.Module, role: str, base: str, head: str) -> str | None:
    """Return the dtype in which a kept weight multiplies; None: the code of the model decides, at each forward.

    ``role`` is the word of ``selection.built_in`` for the layer, or "". With ``head="fp8"`` the products of a head
    differ between training and evaluation.
    """
    if role.startswith("output head") and head == FLOAT32:
        return FLOAT32
    if role.startswith(_MAYBE_FLOAT32) or (role.startswith("output head") and head == "fp8"):
        return None
    if matmul.kind == "Linear":
        follows = own_class(module).forward is nn.Linear.forward and "forward" not in vars(module)
    elif matmul.kind == "stacked experts":
        follows = is_stack(module)
    else:
        follows = matmul.kind == "Conv1D"
    return base if follows else None


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
    """Return the summary, the table with one row per kind of block, and the source of the gains."""
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
