"""Turn the committed notebook of the examples into a page: its text, its cells and their outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


def page() -> str:
    """Return the notebook as Markdown, without its title: the page has one."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join(_text(cell) if cell["cell_type"] == "markdown" else _code(cell) for cell in cells)
    return re.sub(r"\A# .*\n", "", text).strip()


def _text(cell: Mapping[str, Any]) -> str:
    """Return the text of a cell, with links to the docs as links of the site."""
    return "".join(cell["source"]).replace("](../docs/", "](")


def _code(cell: Mapping[str, Any]) -> str:
    source = "".join(cell["source"])
    return "\n\n".join([f"```python\n{source}\n```", *filter(None, map(_output, cell["outputs"]))])


def _output(output: Mapping[str, Any]) -> str:
    """Return an output as a picture, or as a block of text, to scroll sideways: HTML in one line."""
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="losses of the comparison" src="data:image/png;base64,{data["image/png"].strip()}">'
    said = "".join(output.get("text", data.get("text/plain", [])))
    return f"<pre style='overflow-x:auto'>{escape(said.rstrip()).replace(chr(10), '&#10;')}</pre>"
