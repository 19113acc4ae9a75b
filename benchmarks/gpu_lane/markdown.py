"""Tables and numbers as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

Row = Iterable[object]


def table(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table; empty if there are no rows."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    head = list(head)
    return "\n".join([f"| {' | '.join(map(str, head))} |", "|" + "---|" * len(head), *lines]) if lines else ""


def number(value: object, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "-" if value is None else str(value)
