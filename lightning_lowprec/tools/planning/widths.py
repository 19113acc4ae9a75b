"""The number formats that each precision computes with, keeps and sends: the table of ``lowprec plan --precisions``.

A test trains a layer under every precision that runs on a CPU and compares what it sees with this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lightning_lowprec import names
from lightning_lowprec.conversion.name_suffixes import MASTERS, families, split
from lightning_lowprec.tools.table import format_table

LIGHTNINGS: Final = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")
GEMMS: Final = ("output", "grad_input", "grad_weight")
STATE: Final = ("weight", "gradient", "master", "moments", "ddp")
COLUMNS: Final = (*GEMMS, *STATE, "fsdp2")
_E5M2: Final = "e5m2, e4m3"
_MSAMP: Final = "e4m3, fp16"
_LEAN: Final = "e4m3, e5m3"
# fmt: off
_ROWS: Final[Mapping[str, tuple[str, ...]]] = {
    #                      output  in grad weight grad  weight  grad    master   moments ddp     fsdp2
    "32-true":            ("fp32", "fp32", "fp32",      "fp32", "fp32", "-",     "fp32", "fp32", "fp32"),
    "bf16-mixed":         ("bf16", "bf16", "bf16",      "fp32", "fp32", "-",     "fp32", "fp32", "bf16"),
    "bf16-true":          ("bf16", "bf16", "bf16",      "bf16", "bf16", "-",     "bf16", "bf16", "bf16"),
    "16-mixed":           ("fp16", "fp16", "fp16",      "fp32", "fp32", "-",     "fp32", "fp32", "fp16"),
    "16-true":            ("fp16", "fp16", "fp16",      "fp16", "fp16", "-",     "fp16", "fp16", "fp16"),
    "half-auto":          ("bf16", "bf16", "bf16",      "fp32", "fp32", "-",     "fp32", "fp32", "bf16"),
    "bf16-master":        ("bf16", "bf16", "bf16",      "bf16", "bf16", "fp32",  "fp32", "bf16", "bf16"),
    "fp16-master":        ("fp16", "fp16", "fp16",      "fp16", "fp16", "fp32",  "fp32", "fp16", "fp16"),
    "bf16-remainder":     ("bf16", "bf16", "bf16",      "bf16", "bf16", "int16", "fp32", "bf16", "bf16"),
    "bf16-sr":            ("bf16", "bf16", "bf16",      "bf16", "bf16", "-",     "fp32", "bf16", "bf16"),
    "bf16-lean":          ("bf16", "bf16", "bf16",      "bf16", "bf16", "int16", _LEAN,  "bf16", "bf16"),
    "bf16-lean-sr":       ("bf16", "bf16", "bf16",      "bf16", "bf16", "-",     _LEAN,  "bf16", "bf16"),
    "fp8-lean":           ("e4m3", _E5M2,  _E5M2,       "bf16", "bf16", "int16", _LEAN,  "bf16", "e4m3"),
    "fp8-hybrid":         ("e4m3", _E5M2,  _E5M2,       "fp32", "fp32", "-",     "fp32", "fp32", "e4m3"),
    "fp8-e4m3":           ("e4m3", "e4m3", "e4m3",      "fp32", "fp32", "-",     "fp32", "fp32", "e4m3"),
    "fp8-tensorwise":     ("e4m3", _E5M2,  _E5M2,       "fp32", "fp32", "-",     "fp32", "fp32", "e4m3"),
    "fp8-hybrid-torchao": ("e4m3", _E5M2,  _E5M2,       "fp32", "fp32", "-",     "fp32", "fp32", "e4m3"),
    "fp8-e4m3-torchao":   ("e4m3", "e4m3", "e4m3",      "fp32", "fp32", "-",     "fp32", "fp32", "e4m3"),
    "fp8-rowwise":        ("e4m3", "e4m3", "e4m3",      "fp32", "fp32", "-",     "fp32", "fp32", "bf16"),
    "fp8-rowwise-gw-hp":  ("e4m3", "e4m3", "bf16",      "fp32", "fp32", "-",     "fp32", "fp32", "bf16"),
    "fp8-hybrid-te":      ("e4m3", _E5M2,  _E5M2,       "fp32", "fp32", "-",     "fp32", "fp32", "e4m3"),
    "fp8-e4m3-te":        ("e4m3", "e4m3", "e4m3",      "fp32", "fp32", "-",     "fp32", "fp32", "e4m3"),
    "fp8-current":        ("e4m3", _E5M2,  _E5M2,       "fp32", "fp32", "-",     "fp32", "fp32", "e4m3"),
    "fp8-block":          ("e4m3", "e4m3", "e4m3",      "fp32", "fp32", "-",     "fp32", "fp32", "bf16"),
    "mxfp8":              ("e4m3", "e4m3", "e4m3",      "fp32", "fp32", "-",     "fp32", "fp32", "bf16"),
    "mxfp8-te":           ("e4m3", "e4m3", "e4m3",      "fp32", "fp32", "-",     "fp32", "fp32", "bf16"),
    "mxfp8-torchao":      ("e4m3", "e4m3", "e4m3",      "fp32", "fp32", "-",     "fp32", "fp32", "bf16"),
    "int8-mixed":         ("int8", "int8", "int8",      "fp32", "fp32", "-",     "fp32", "fp32", "bf16"),
    "nvfp4":              ("e2m1", "e2m1", "e2m1",      "fp32", "fp32", "-",     "fp32", "fp32", "bf16"),
    "int8-mixed-fp16":    ("int8", "int8", "int8",      "fp32", "fp32", "-",     "fp32", "fp32", "fp16"),
    "msamp-o1":           ("e4m3", _E5M2,  _E5M2,       "fp16", "e4m3", "-",     "fp32", "e4m3", "-"),
    "msamp-o2":           ("e4m3", _E5M2,  _E5M2,       "fp16", "e4m3", "-",     _MSAMP, "e4m3", "-"),
    "msamp-o3":           ("e4m3", _E5M2,  _E5M2,       "e4m3", "e4m3", "fp16",  _MSAMP, "e4m3", "e4m3"),
}
# fmt: on
NOTES: Final = (
    "...-master, ...-remainder, ...-sr: an FP8 or int8 name with this suffix; `...` is the format of the name without."
    " A name with -fp16 has the formats of the name without.",
    "Bits: e2m1 4; e4m3, e5m2, e5m3 and int8 8; bf16, fp16 and int16 16; fp32 32.",
    "output, grad input, grad weight: the operands of the three GEMMs of a Linear, the gradient first.",
    "master: kept beside the weight; int16 holds the digits of fp32 that a bf16 weight lacks.",
    "ddp: the format in which a gradient is sent. fsdp2: the format in which a weight is sent; gradients go in fp32.",
    "-: there is none, or the precision does not run under that strategy. half-auto: fp16 on a device without bf16.",
)


def all_names() -> list[str]:
    """Return Lightning's names, then the names of this package and of backends that were registered."""
    return [*LIGHTNINGS, *names.TABLE]


def widths(name: str) -> dict[str, str]:
    """Return the format for every column, such as ``fp32``, ``bf16`` or ``e4m3``; ``reason`` if nothing is known.

    A name with ``-fp16`` at its end has the formats of the name without: fp16 instead of bf16 changes the layers that
    do not run in FP8, which this table leaves out. ``-master``, ``-remainder`` and ``-sr`` change the state as the
    suffixes of ``bf16-master``, ``bf16-remainder`` and ``bf16-sr`` do.
    """
    stem, suffix = split(name)
    row = _ROWS.get(name, _ROWS.get(stem))
    if row is None:
        return {"precision": name, "reason": "its backend is not part of lightning_lowprec"}
    found = {"precision": name, **dict(zip(COLUMNS, row, strict=True))}
    if name not in _ROWS and suffix in MASTERS:
        state = dict(zip(COLUMNS, _ROWS[f"bf16{suffix}"], strict=True))
        found |= {column: state[column] for column in STATE}
    return found


def text(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table for a terminal, with notes below; families of names, not every member."""
    stems = {name for names in families([row["precision"] for row in rows]).values() for name in names}
    known = [list(row.values()) for row in rows if "reason" not in row and row["precision"] in stems]
    known += [
        [f"...{suffix}", *("..." for _ in GEMMS), *(_ROWS[f"bf16{suffix}"][COLUMNS.index(c)] for c in STATE), "..."]
        for suffix in MASTERS
    ]
    lines = format_table([["precision", *(column.replace("_", " ") for column in COLUMNS)], *known])
    lines += [f"{row['precision']}: not known, {row['reason']}" for row in rows if "reason" in row]
    return "\n".join([*lines, "", *NOTES])
