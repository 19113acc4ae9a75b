"""What the docs quote of errors is a message of the package: headings of the page on troubleshooting, and refusals.

The test of a message shows that it is said. Here a quoted name or number stands for any other.
"""

import re
from html import unescape

import lightning as L
import pytest

from lightning_lowprec import FP8TorchAO
from tests.site.pages import DOCS
from tools.site.hooks import on_page_markdown
from tools.site.messages import GAP

HEADINGS = re.findall(r"^### (.+)$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
OF_OTHERS = ("Received both", "requires you", "mixed dtype")
"""Headings that Lightning and torch raise, so that they are not on our page of messages."""
REFUSED = (DOCS / "what-runs-where.md").read_text().partition("## What is refused")[2].partition("\n## ")[0]
LINES = re.findall(r"^\| .*$", REFUSED, re.MULTILINE)[1:]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in LINES]


def normal(text: str) -> str:
    text = re.sub(r"'[\w-]+'", GAP, unescape(re.sub(r"</?code>|`", "", text)))
    return " ".join(re.sub(r"\b\d+\b|FP8Linear|FP8TE|transformer_engine", GAP, text).split())


@pytest.fixture(scope="module")
def every_message() -> str:
    written = on_page_markdown((DOCS / "troubleshooting.md").read_text(), page=None)
    return normal(written.partition("## Every message")[2])


QUOTED = [heading for heading in HEADINGS if not heading.startswith(OF_OTHERS)] + [row[2] for row in ROWS]


@pytest.mark.parametrize("text", QUOTED, ids=lambda text: re.sub(r"\W+", "-", text)[:40].strip("-"))
def test_the_text_is_a_message_of_the_package(text, every_message):
    assert normal(text) in every_message


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row[0])[:30])
def test_what_a_refusal_names_instead_exists(row):
    for code in re.findall("`([^`]+)`", row[1] + row[4]):
        if re.match(r'FP8TorchAO\(|"', code):
            asked = eval(code, {"FP8TorchAO": FP8TorchAO})
            L.Fabric(accelerator="cpu", **{"precision" if isinstance(asked, str) else "plugins": asked})
