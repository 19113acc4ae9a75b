"""Print the table of what runs where: a column, the whole table, or the answer for one precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any, Final

from lightning_lowprec import names
from lightning_lowprec.architectures import ARCHITECTURES, OTHER, Architecture
from lightning_lowprec.runs_where import RECIPES, TITLES, Cell, RecipeKey, cell, instead
from lightning_lowprec.tools.table import format_table

_ABROAD: Final = [key for key in ARCHITECTURES if not key.startswith("sm_") and key != OTHER.key]
_NVIDIA: Final = [key for key in ARCHITECTURES if key.startswith("sm_")]
LEGEND: Final = "yes: runs. no: known not to run, refused. ?: not known, runs with a warning. emu: emulated, slow."


def word(found: Cell) -> str:
    """Return the answer of a cell in a word."""
    if found.runs is None:
        return "not known"
    return "no" if not found.runs else "emulated" if found.emulated else "yes"


def as_json(architecture: Architecture) -> dict[str, Any]:
    """Return a column: the cells of an architecture by recipe."""
    return {recipe: asdict(cell(recipe, architecture)) for recipe in RECIPES}


def column(architecture: Architecture) -> list[str]:
    """Return a line per answer and reason of an architecture."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for recipe in RECIPES:
        found = cell(recipe, architecture)
        why = f" ({found.reason})" if found.reason else ""
        grouped.setdefault((word(found), f"{why} [{found.source}]"), []).append(recipe)
    lines = [f"Recipes on {architecture.key}, {architecture.title} (`lowprec doctor --all`: on every architecture):"]
    for (answer, why), recipes in grouped.items():
        lines.append(f"    {answer:<9}  {', '.join(recipes)}{why}")
    return lines


def whole() -> str:
    """Return the table, at most 120 characters wide: marks with the numbers of reasons and sources below."""
    notes: dict[str, int] = {}
    blocks = [_block(keys, notes) for keys in (_NVIDIA, _ABROAD)]
    titles = [[key, ARCHITECTURES[key].title] for key in (*_NVIDIA, *_ABROAD)]
    rows = [[recipe, _names_of(recipe), TITLES[recipe]] for recipe in RECIPES]
    below = [
        line
        for note, number in notes.items()
        for line in wrap(f"{number:>3}  {note}", 120, subsequent_indent=" " * 5, break_long_words=False)
    ]
    return "\n".join(
        [LEGEND, "", *blocks[0], "", *blocks[1], "", *format_table(titles), "", *format_table(rows), "", *below]
    )


def _block(keys: Sequence[str], notes: dict[str, int]) -> list[str]:
    header = ["recipe", *keys]
    rows = [[recipe, *(_mark(cell(recipe, ARCHITECTURES[key]), notes) for key in keys)] for recipe in RECIPES]
    return format_table([header, *rows])


def _mark(found: Cell, notes: dict[str, int]) -> str:
    """Return ``"no12"``; 12 is the number of the reason and the source."""
    number = notes.setdefault(_why(found), len(notes) + 1)
    return f"{ {'yes': 'yes', 'no': 'no', 'not known': '?', 'emulated': 'emu'}[word(found)] }{number}"


def _why(found: Cell) -> str:
    return f"{found.reason or 'runs'} [{found.source}]"


def _names_of(recipe: RecipeKey) -> str:
    """Return a name of ``precision=`` for a recipe, or a dash."""
    return next((name for name, row in names.TABLE.items() if row.hardware_recipe == recipe), "-")


def recipe_of(name: str) -> RecipeKey:
    """Return the recipe of a precision, or the recipe itself.

    Raises:
        ValueError: the name is neither; the message lists the recipes.
    """
    found = next((recipe for recipe in RECIPES if recipe == name), None)
    if found is None and name in names.TABLE:
        found = names.resolve(name).hardware_recipe
        if found is None:
            raise ValueError(
                f"`precision={name!r}` has no row in the table of what runs where; its backend gives none."
            )
    if found is None:
        raise ValueError(f"{names.unknown_name(name)} Recipes are allowed too: {', '.join(RECIPES)}.")
    return found


def one(name: str, architecture: Architecture) -> tuple[Cell, str]:
    """Return the cell of a precision or recipe, and the answer in words: reason, source, and what to use instead.

    Raises:
        ValueError: see :func:`recipe_of`.
    """
    recipe = recipe_of(name)
    found = cell(recipe, architecture)
    text = f"{name} on {architecture.key}: {word(found)}\n{architecture.title} {_why(found)}"
    return found, f"{text}. Use {instead(recipe, architecture)}." if found.runs is False else f"{text}."
