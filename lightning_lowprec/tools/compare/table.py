"""A comparison as plain text."""

from __future__ import annotations

from lightning_lowprec.tools.compare.remarks import remarks
from lightning_lowprec.tools.compare.result import Comparison, PrecisionResult, Verdict


def render(comparison: Comparison) -> str:
    """A table with one line per precision, and what to know before reading it."""
    rows = [header(comparison), *cells(comparison)]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return "\n".join([*(_line(row, widths) for row in rows), *remarks(comparison)])


def header(comparison: Comparison) -> tuple[str, ...]:
    """The names of the columns."""
    return ("precision", comparison.spec.val_metric, "gap", "train loss", "step time", "peak memory", "verdict")


def cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """The cells below `header`: words, with units."""
    return [_cells(*pair) for pair in zip(comparison.results, comparison.verdicts, strict=True)]


def _cells(result: PrecisionResult, verdict: Verdict) -> tuple[str, ...]:
    return (
        result.name,
        _number(result.final_val, ".4f"),
        _number(verdict.gap, "+.2%"),
        _number(result.final_train, ".4f"),
        _number(result.step_time, ".1f", 1e3, " ms"),
        _number(result.peak_memory, ".0f", 2**-20, " MiB"),
        verdict.text,
    )


def _number(value: float | None, form: str, scale: float = 1.0, unit: str = "") -> str:
    return "-" if value is None else f"{value * scale:{form}}{unit}"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    first, *middle = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False))
    return "  ".join([first.strip().ljust(widths[0]), *middle, row[-1]])
