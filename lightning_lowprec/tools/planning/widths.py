"""The table of ``lowprec plan --precisions``: the number formats of every name (:mod:`.conversion.name_formats`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lightning_lowprec import names
from lightning_lowprec.conversion.name_formats import COLUMNS, HALF, LIGHTNINGS
from lightning_lowprec.conversion.name_suffixes import MASTERS, families
from lightning_lowprec.tools.table import format_table

NOTES: Final = (
    "...-master, ...-remainder, ...-sr: an FP8 or int8 name with this suffix; `...` is the format of the name without."
    " A name with -fp16 has the formats of the name without.",
    "Bits: e2m1 4; e4m3, e5m2, e5m3 and int8 8; bf16, fp16 and int16 16; fp32 32.",
    "output, grad input, grad weight: the operands of the three GEMMs of a Linear, the gradient first.",
    "master: kept beside the weight; int16 holds the digits of fp32 that a bf16 weight lacks.",
    "ddp: the format in which a gradient is sent. fsdp2: the format in which a weight is sent; gradients go in fp32.",
    "-: there is none, or the precision does not run under that strategy. half-auto: fp16 on a device without bf16.",
)


_OF_THE_NAME: Final = ("output", "grad_input", "grad_weight", "fsdp2")
"""Columns that a suffix does not change."""


def all_names() -> list[str]:
    """Return Lightning's names, then the names of this package and of backends that were registered."""
    return [*LIGHTNINGS, *names.TABLE]


def widths(name: str) -> dict[str, str]:
    """Return the format for every column, such as ``fp32``, ``bf16`` or ``e4m3``; ``reason`` if nothing is known."""
    row = names.TABLE.get(name)
    formats = LIGHTNINGS.get(name) if row is None else row.formats
    if formats is None:
        return {"precision": name, "reason": "its backend does not say it"}
    return {"precision": name, **formats.row()}


def text(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table for a terminal, with notes below; families of names, not every member."""
    stems = {name for names in families([row["precision"] for row in rows]).values() for name in names}
    known = [list(row.values()) for row in rows if "reason" not in row and row["precision"] in stems]
    known += [
        [f"...{suffix}", *("..." if c in _OF_THE_NAME else of for c, of in HALF[f"bf16{suffix}"].row().items())]
        for suffix in MASTERS
    ]
    lines = format_table([["precision", *(column.replace("_", " ") for column in COLUMNS)], *known])
    lines += [f"{row['precision']}: not known, {row['reason']}" for row in rows if "reason" in row]
    return "\n".join([*lines, "", *NOTES])
