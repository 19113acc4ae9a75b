"""Hooks of mkdocs: write the list of names, the list of messages, the notebook, and the box that says what has run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.site import messages, notebook


def names_table() -> str:
    """Return the Markdown table of every name, with its plugin, options and recipe of the hardware table."""
    from lightning_lowprec.names import TABLE

    rows = ["| `precision=` | plugin | options | recipe | |", "|---|---|---|---|---|"]
    for name, row in TABLE.items():
        options = ", ".join(f"`{key}={_shown(value)}`" for key, value in row.options.items())
        rows.append(f"| `{name}` | `{row.plugin.__name__}` | {options} | `{row.hardware_recipe}` | {row.summary} |")
    return "\n".join(rows)


def formats_table() -> str:
    """Return the Markdown table with the number formats of Lightning's names and of every name."""
    from lightning_lowprec.conversion.name_formats import COLUMNS, LIGHTNINGS
    from lightning_lowprec.names import TABLE

    formats = {**LIGHTNINGS, **{name: row.formats for name, row in TABLE.items()}}
    header = ["`precision=`", *(column.replace("_", " ") for column in COLUMNS)]
    rows = [header, ["---"] * len(header)]
    rows += [[f"`{name}`", *known.row().values()] for name, known in formats.items() if known is not None]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(value: Any) -> str:
    """Return a value as a reader writes it; of a configuration only what differs from its defaults."""
    defaults = getattr(type(value), "__dataclass_fields__", None)
    if defaults is None:
        return repr(value)
    chosen = {key: getattr(value, key) for key, field in defaults.items() if getattr(value, key) != field.default}
    return f"{type(value).__name__}({', '.join(f'{key}={entry!r}' for key, entry in chosen.items())})"


def status() -> str:
    """Return the box that says what has run: the paragraph of docs/what-runs-where.md, the only place that says it."""
    page = (Path(__file__).parents[2] / "docs" / "what-runs-where.md").read_text(encoding="utf-8")
    text = page.partition("\n## What has run\n\n")[2].partition("\n\n")[0]
    return '!!! note "What has run"\n' + re.sub("^", "    ", text, flags=re.MULTILINE)


def install() -> str:
    """Return the line that installs this package, from README.md, for all pages."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    line = next(line for line in readme.splitlines() if line.startswith("pip install "))
    return f"\n```bash\n{line.partition(' #')[0].rstrip()}\n```\n"


WRITTEN: Mapping[str, Callable[[], str]] = {
    "names": names_table, "formats": formats_table, "messages": messages.page, "notebook": notebook.page,
    "status": status, "install": install,
}  # fmt: skip
"""What stands between the markers ``<!-- NAME -->`` and ``<!-- /NAME -->`` of a page."""


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Mark the words of code in cells of tables: the style sheet breaks a line only between them."""

    def marked(code: re.Match[str]) -> str:
        words = [f'<span class="name">{word}</span>' for word in code[1].split(" ")]
        return f"<code>{' '.join(words)}</code>"

    return re.sub(r"<t[dh].*?</t[dh]>", lambda cell: re.sub("<code>([^<]*)</code>", marked, cell[0]), html, flags=re.S)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the written parts between their markers."""
    for name, written in WRITTEN.items():
        before, begin, rest = markdown.partition(f"<!-- {name} -->")
        if begin:
            markdown = f"{before}{written()}{rest.partition(f'<!-- /{name} -->')[2]}"
    return markdown
