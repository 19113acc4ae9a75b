"""Every command line on the README and the site is parsed by its own parser, and names files and targets that exist."""

import re

import pytest

from lightning_lowprec.tools import cli
from tests.site.commands import check_line
from tests.site.pages import ROOT, Block, blocks
from tools.site.hooks import install

LANGUAGES = {"python", "bash", "yaml", "text", "toml", "diff"}


@pytest.mark.parametrize("block", blocks("bash"), ids=lambda block: block.name)
def test_every_line_is_a_valid_command(block: Block, monkeypatch: pytest.MonkeyPatch):
    for line in block.code.splitlines():
        check_line(line, monkeypatch)


def test_the_guide_has_valid_commands_and_every_block_a_language_and_every_command_a_line(
    monkeypatch: pytest.MonkeyPatch,
):
    assert {block.language for block in blocks()} <= LANGUAGES
    for _, line in cli.GUIDE:
        check_line(line.replace("--trainer.precision ", "--trainer.precision="), monkeypatch)
    text = (ROOT / "docs" / "command-line.md").read_text()
    assert all(f"lowprec {command}" in text for command in cli.COMMANDS)


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_the_first_pages_install_what_their_commands_need(page: str):
    text = (ROOT / page).read_text()
    installed = re.findall(r"^pip install '\.\[([\w,]+)\]'", text, flags=re.MULTILINE)
    needed = {
        extra for command, extra in {"lowprec plan llama": "hf", "make demo": "report"}.items() if command in text
    }
    assert needed <= set(installed[0].split(",")), "hf: transformers, report: pictures"


def test_nobody_is_sent_to_an_index_for_this_package():
    """The name is free there, so that anyone could publish something under it. One line installs, everywhere."""
    for page in ("docs/getting-started.md", "examples/first_steps.ipynb"):
        assert re.search(r"pip install '[^']+'", (ROOT / page).read_text())[0] == install().split("\n")[2]
    files = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
    files += [path for folder in ("lightning_lowprec", "docs", "examples") for path in (ROOT / folder).rglob("*.*")]
    texts = {path: path.read_text(errors="ignore") for path in files if path.suffix in (".py", ".md", ".ipynb")}
    assert not [path for path, text in texts.items() if re.search(r"install[^\n`]*lightning[-_]lowprec", text)]
