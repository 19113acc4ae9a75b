"""The reasons why a known name does not exist with some suffixes, and the remedies, for error messages."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_lowprec.conversion.backends import PrecisionName
from lightning_lowprec.conversion.name_suffixes import FP16, MASTERS, OPTIONS, split_all


def suffix_refusal(name: str, table: Mapping[str, PrecisionName]) -> str:
    """Return why a name of a backend does not exist with these suffixes, and what to write; ``""`` for other names.

    Args:
        name: an unknown name, such as ``fp8-tensorwise-fp16-remainder``.
        table: the rows of all names.
    """
    stem, suffixes = split_all(name)
    row = table.get(stem)
    if row is None or row.backend is None or not suffixes:
        return ""
    has = {FP16: row.fp16, **dict.fromkeys(MASTERS, row.masters)}
    lacking = next((suffix for suffix in suffixes if not has[suffix]), None)
    if lacking is not None:
        codes = "it keeps its weights as codes, with masters of its own where they are needed"
        reason = codes if row.keeps_codes and lacking in MASTERS else "its backend has no such name"
        return f"{stem!r} has no `{lacking}`: {row.lacks.get(lacking, reason)}."
    forms = [suffix for suffix in suffixes if suffix != FP16]
    if FP16 in suffixes and forms:
        return _both(stem, row, forms[0])
    return f"A name has one suffix: write {stem + suffixes[0]!r}." if len(suffixes) > 1 else ""


def call(row: PrecisionName, **options: object) -> str:
    """Return the call that makes the plugin of a name with more options, as a user would write it."""
    given = {**row.options, **options}
    return f"{row.plugin.__name__}({', '.join(f'{option}={value!r}' for option, value in given.items())})"


def _both(stem: str, row: PrecisionName, form: str) -> str:
    reason = (
        "names with `-fp16` keep float32 weights"
        if MASTERS[form] == "fp32"
        else f"`{form}` needs bf16 weights, because bf16 is the upper half of float32 and fp16 is not"
    )
    masters = call(row, **OPTIONS[FP16], **OPTIONS["-master"])
    return (
        f"`-fp16` and `{form}` do not go together: {reason}. Write '{stem}{form}' for bf16, or `plugins={masters}` for"
        " fp16 weights with float32 masters."
    )
