"""Print the table of what runs where: a column, the whole table, or the answer for one precision."""

from collections.abc import Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Final

from lightning_lowprec import names
from lightning_lowprec.runs_where import (
    ARCHITECTURES,
    OTHER,
    RECIPES,
    TITLES,
    Architecture,
    Cell,
    RecipeKey,
    cell,
    instead,
)
from lightning_lowprec.tools.output import WIDTH, folded, format_table

_NVIDIA: Final = [key for key in ARCHITECTURES if key.startswith("sm_")]
_ABROAD: Final = [key for key in ARCHITECTURES if key not in (*_NVIDIA, OTHER.key)]
LEGEND: Final = "yes: runs. no: known not to run, refused. ?: not known, runs with a warning. emu: emulated, slow."


def word(cell: Cell) -> str:
    """Return the answer of a cell in a word."""
    if cell.runs is None:
        return "not known"
    return "no" if not cell.runs else "emulated" if cell.emulated else "yes"


def as_json(architecture: Architecture) -> dict[str, object]:
    """Return a column: the cells of an architecture by recipe."""
    return {recipe: asdict(cell(recipe, architecture)) for recipe in RECIPES}


def column(architecture: Architecture) -> list[str]:
    """Return a line per answer and reason of an architecture."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for recipe in RECIPES:
        answer = cell(recipe, architecture)
        why = f" ({answer.reason})" if answer.reason else ""
        grouped.setdefault((word(answer), f"{why} [{answer.source}]"), []).append(recipe)
    lines = [f"Recipes on {architecture.key}, {architecture.title} (`lowprec doctor --all`: on every architecture):"]
    for (said, why), recipes in grouped.items():
        lines.append(f"    {said:<9}  {', '.join(recipes)}{why}")
    return folded(lines)


def whole() -> str:
    """Return the table, at most 100 characters wide: marks with the numbers of reasons and sources below."""
    notes: dict[str, int] = {}
    blocks = [_block(keys, notes) for keys in (_NVIDIA, _ABROAD)]
    titles = [[key, ARCHITECTURES[key].title] for key in (*_NVIDIA, *_ABROAD)]
    name_of = {row.hardware_recipe: name for name, row in reversed(names.TABLE.items())}
    rows = [[recipe, name_of.get(recipe, "-"), TITLES[recipe]] for recipe in RECIPES]
    below = [
        line
        for note, number in notes.items()
        for line in wrap(f"{number:>3}  {note}", WIDTH, subsequent_indent=" " * 5, break_on_hyphens=False)
    ]
    return "\n".join(
        [LEGEND, "", *blocks[0], "", *blocks[1], "", *format_table(titles), "", *format_table(rows), "", *below]
    )


def _block(keys: Sequence[str], notes: dict[str, int]) -> list[str]:
    header = ["recipe", *keys]
    rows = [[recipe, *(_mark(cell(recipe, ARCHITECTURES[key]), notes) for key in keys)] for recipe in RECIPES]
    return format_table([header, *rows])


def _mark(cell: Cell, notes: dict[str, int]) -> str:
    """Return ``"no12"``; 12 is the number of the reason and the source."""
    number = notes.setdefault(_why(cell), len(notes) + 1)
    return f"{ {'not known': '?', 'emulated': 'emu'}.get(word(cell), word(cell)) }{number}"


def _why(cell: Cell) -> str:
    return f"{cell.reason or 'runs'} [{cell.source}]"


def _recipe_of(name: str) -> RecipeKey:
    for recipe in RECIPES:
        if recipe == name:
            return recipe
    if name not in names.TABLE:
        raise ValueError(f"{names.unknown_name(name, ())} Recipes are allowed too: {', '.join(RECIPES)}.")
    of_name = names.TABLE[name].hardware_recipe
    if of_name is None:
        raise ValueError(f"`precision={name!r}` has no row in the table of what runs where; its backend gives none.")
    return of_name


def one(name: str, architecture: Architecture) -> tuple[Cell, str]:
    """Return the cell of a precision or recipe, and the answer in words: reason, source, and what to use instead."""
    recipe = _recipe_of(name)
    answer = cell(recipe, architecture)
    text = f"{name} on {architecture.key}: {word(answer)}\n{architecture.title} {_why(answer)}"
    return answer, f"{text}. Use {instead(recipe, architecture)}." if answer.runs is False else f"{text}."
