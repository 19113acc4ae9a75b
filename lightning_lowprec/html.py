"""Small pieces of HTML for notebooks: every text is escaped, and nothing has a colour, a script or an address.

Without colours the pieces follow the theme of the notebook, light or dark.
"""

from collections.abc import Collection, Sequence
from html import escape
from typing import Final

ROWS_SHOWN: Final = 40
"""Rows of a table that are shown at once; the others are behind a line that opens with a click."""


def paragraph(text: str, *, bold: bool = False) -> str:
    """Return a paragraph with ``text``, escaped."""
    return f"<p><b>{escape(text)}</b></p>" if bold else f"<p>{escape(text)}</p>"


def small(text: str) -> str:
    """Return a paragraph in small letters with ``text``, escaped."""
    return f"<p><small>{escape(text)}</small></p>"


def block(text: str) -> str:
    """Return ``text`` with its lines, as code."""
    return f"<pre>{escape(text)}</pre>"


def bullets(items: Sequence[str]) -> str:
    """Return a list with one point per item."""
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Return a table of plain text, the header first. The rows after the first 40 are folded, and open with a click.

    ``right`` has the columns that are aligned to the right.
    """
    header, body = rows[0], rows[1:]
    shown, folded = body[:ROWS_SHOWN], body[ROWS_SHOWN:]
    text = _table(header, shown, right)
    if folded:
        text += f"<details><summary>{len(folded)} more rows</summary>{_table(header, folded, right)}</details>"
    return text


def _table(header: Sequence[str], body: Sequence[Sequence[str]], right: Collection[int]) -> str:
    lines = "".join(_row(row, "td", right) for row in body)
    return f"<table><thead>{_row(header, 'th', right)}</thead><tbody>{lines}</tbody></table>"


def _row(cells: Sequence[str], tag: str, right: Collection[int]) -> str:
    marked = (
        f'<{tag} style="text-align:{"right" if i in right else "left"}">{escape(cell)}</{tag}>'
        for i, cell in enumerate(cells)
    )
    return f"<tr>{''.join(marked)}</tr>"
