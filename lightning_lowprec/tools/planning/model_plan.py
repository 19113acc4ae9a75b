"""The plan of a model from Python: what ``lowprec plan`` prints, as an object that a notebook shows as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import nn

from lightning_lowprec import names as precisions
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.backends import PrecisionName
from lightning_lowprec.conversion.gains import Recipe
from lightning_lowprec.conversion.options import LayerChoices, LayerOptions
from lightning_lowprec.conversion.plan import Plan, make_plan
from lightning_lowprec.conversion.recipe_map import RecipeMap
from lightning_lowprec.names import validate_name
from lightning_lowprec.tools.planning.source import load


def plan(
    model: nn.Module | str,
    precision: str = "fp8-hybrid",
    *,
    recipe: Mapping[str, Any] | None = None,
    **options: Unpack[LayerChoices],
) -> Plan:
    """Return which layers of a model run in low precision, and why the others do not. Nothing is changed or trained.

    A notebook shows the plan as a table; ``print(plan)`` has one line per layer.

    Args:
        model: a model, also on the meta device; or what ``lowprec plan`` takes: a class path (``"my.Model"``), a config
            or a checkpoint, or a model type of transformers (``"llama"``), of which no weights are made or downloaded.
        precision: the name of a precision that converts layers.
        recipe: recipes per layer, by pattern; the first pattern that matches wins: ``{"*.o_proj": "rowwise", "*":
            "tensorwise"}``.
        options: the choices of layers that plugins take too: ``keep``, ``only``, ``min_gain`` and the others.

    Raises:
        ValueError: the precision is not known or converts no layers, or a pattern matches no layer.
        TypeError: the model or an option is of a wrong type.
    """
    if not isinstance(model, nn.Module | str):
        raise TypeError(
            f"`model={model!r}` is not valid; expected a Module, or a string as for `lowprec plan`, such as 'llama'."
        )
    name = converting_name(precision)
    request = name.plan_request(recipes_of(recipe, precision, name))
    return make_plan(load(model, {}).model if isinstance(model, str) else model, LayerOptions(**options), request)


def converting_name(precision: str) -> PrecisionName:
    """Return the row of a precision that converts layers.

    Raises:
        ValueError: the precision is not known, or converts no layers.
    """
    validate_name(precision)
    converting = {name: row for name, row in precisions.TABLE.items() if row.backend is not None}
    if precision not in converting:
        raise ValueError(f"`precision={precision!r}` converts no layers; expected one of: {', '.join(converting)}.")
    return converting[precision]


def recipes_of(patterns: Mapping[str, Any] | None, precision: str, name: PrecisionName) -> Recipe | RecipeMap:
    """Return the recipes per layer that the user gives, or the recipe of the precision.

    Raises:
        ValueError: the precision has no recipes per layer, or a recipe is not known.
    """
    if not patterns:
        return name.gains
    recipes = backends.get(name.backend).recipes
    if not recipes:
        raise ValueError(f"`precision={precision!r}` has no recipes per layer; leave `recipe` (`--recipe`) out.")
    choices = name.layer_recipes or tuple(recipes)
    return RecipeMap.of(patterns, names=choices, base=choices[0])
