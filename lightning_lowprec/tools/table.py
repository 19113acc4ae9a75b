"""Print rows of cells as a table: aligned for a terminal, or in Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence


def format_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), markdown: bool = False) -> list[str]:
    """Return one line per row; Markdown has one line more, below the header.

    Args:
        rows: the cells, all rows of one length; the first row is the header.
        right: the columns that are aligned to the right, by index.
        markdown: write Markdown. Characters that Markdown would interpret are escaped.
    """
    if markdown:
        rows = [[re.sub(r"([\\`*|<])", r"\\\1", cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)]
        lines.append(f"| {' | '.join(cells)} |" if markdown else "  ".join(cells).rstrip())
    if markdown:
        rule = "|".join("-" * (width + 1) + (":" if i in right else "-") for i, width in enumerate(widths))
        lines.insert(1, f"|{rule}|")
    return lines
