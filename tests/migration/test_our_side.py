"""docs/migration.md names only what exists: every call of ours there is made, every recipe and name looked up."""

import re
from importlib.util import find_spec

import pytest
import torch

from lightning_lowprec import FP8TE, MSAMP, FP8TorchAO, FSDP2Strategy, HalfEval, HalfMixed, recipes
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.names import OF_LIGHTNING, TABLE
from lightning_lowprec.precision.loss_scale import LossScale
from tests.migration.quoted import PAGE, SOURCES, known, sections

TEXT = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
OURS = {
    cls.__name__: cls for cls in (FP8TE, MSAMP, FP8TorchAO, FSDP2Strategy, HalfEval, HalfMixed, LossScale, MasterConfig)
}
SPANS = re.findall(r"`([^`]+)`", TEXT)
CALLS = sorted({span for span in SPANS if re.match(rf"({'|'.join(OURS)})\(", span)})
MADE = [call for call in CALLS if find_spec("transformer_engine") or not call.startswith("FP8TE(")]
"""Those of FP8TE need Transformer Engine: `make test-te` makes them too."""
THEIRS = {name for stack in SOURCES for name in known(stack)}


def rows():
    tables = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| there")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in tables]


@pytest.mark.parametrize("call", MADE)
def test_every_call_can_be_made(call):
    made = eval(
        call,
        {
            "torch": torch,
            "group": None,
            "plan": {"blocks.0.up": None},
            **OURS,
        },
    )
    assert type(made).__name__ == call.partition("(")[0]


def test_names_and_recipes_exist():
    for recipe in re.findall(r"`(\w+)\(\)`", TEXT):
        assert hasattr(recipes, recipe) or recipe in OURS or recipe in THEIRS, recipe
    ours = [row[1] for row in rows()]
    for name in re.findall(r'`precision="([\w-]+)"`', " ".join(ours)):
        assert name in TABLE, name
    for name in re.findall(r"Lightning's `([\w-]+)`(?: and `([\w-]+)`)?", TEXT):
        assert {part for part in name if part} <= set(OF_LIGHTNING), name


def test_every_stack_has_a_section_with_a_table_and_their_config_beside_ours():
    listed = re.findall(r"\]\(#from-(.+?)\)", PAGE.read_text().partition("\n## ")[0])
    assert len(listed) == len(sections()) == len(SOURCES)
    for section in sections().values():
        assert section.count("\n| there | here |\n") == 1
        assert re.findall(r"^```(\w+)$", section, flags=re.MULTILINE)[:2] == ["text", "python"]
    assert all(len(row) == 2 and all(row) for row in rows() if not row[0].startswith("---"))
