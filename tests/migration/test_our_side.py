"""docs/migration.md names only what exists of ours, and its last column says what tests run."""

import re
from importlib.util import find_spec

import pytest
import torch

import lightning_lowprec
from lightning_lowprec import recipes
from tests.representatives import OF_LIGHTNING, TABLE
from tests.site.pages import DOCS

TEXT = re.sub(r"```.*?```", "", (DOCS / "migration.md").read_text(), flags=re.DOTALL)
OF_OURS = ("FP8TE", "MSAMP", "FP8TorchAO", "FSDP2Strategy", "HalfEval", "HalfMixed", "LossScale", "MasterConfig")
OURS = {name: getattr(lightning_lowprec, name) for name in OF_OURS}
SPANS = re.findall(r"`([^`]+)`", TEXT)
CALLS = sorted({span for span in SPANS if re.match(rf"({'|'.join(OURS)}|recipes\.\w+)\(", span)})
OF_TE = ("FP8TE(", "recipes.bf16_with_")
MADE = [call for call in CALLS if find_spec("transformer_engine") or not call.startswith(OF_TE)]
"""Those of Transformer Engine need it: `make test-te` makes them too."""


def rows():
    tables = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| there")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in tables]


@pytest.mark.parametrize("call", MADE)
def test_every_call_can_be_made(call):
    made = eval(call, {"torch": torch, "group": None, "plan": {"blocks.0.up": None}, "recipes": recipes, **OURS})
    assert call.startswith((f"{type(made).__name__}(", "recipes."))


def test_names_and_recipes_exist():
    for recipe in re.findall(r"`(\w+)\(\)`", TEXT):
        assert hasattr(recipes, recipe) or recipe in OURS or recipe == "AORecipeKwargs", recipe
    ours = [row[1] for row in rows()]
    for name in re.findall(r'`precision="([\w-]+)"`', " ".join(ours)):
        assert name in TABLE, name
    for name in re.findall(r"Lightning's `([\w-]+)`(?: and `([\w-]+)`)?", TEXT):
        assert {part for part in name if part} <= set(OF_LIGHTNING), name


def is_answered(word):
    with pytest.raises((TypeError, ValueError)) as raised:
        OURS["HalfMixed"](**{word.strip("-"): "?"})
    return (
        re.search(r"keyword argument '.*?'\. (?!Did you mean|.* has left the package)", str(raised.value)) is not None
    )


def ran(there, here):
    ours = re.findall(r"`([^`]+)`", here)
    words = re.findall(r"[\w-]+", " ".join(re.findall(r"`([^`]+)`", there)))
    ways = {
        "call": any(span in CALLS and not span.startswith(OF_TE) for span in ours),
        "te": any(span.startswith(OF_TE) or span.endswith('-te"') for span in ours),
        "name": any(span.removeprefix('precision="').removesuffix('"') in TABLE for span in ours),
        "strategy": any(span.startswith("strategy=") for span in ours),
        "Lightning": "Lightning's" in here or "gradient_clip_val" in here,
        "sentence": any(map(is_answered, words)),
        "link": "](" in here,
    }
    return ", ".join(way for way, found in ways.items() if found) or ("no equal" if "no equal" in here else "suite")


def test_the_last_column_says_what_was_run():
    for there, here, said in rows():
        if not there.startswith("---"):
            assert said == ran(there, here), there
