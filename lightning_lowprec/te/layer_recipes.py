"""Recipes per layer of Transformer Engine: a mapping of patterns to recipes, as recipe objects.

The plugin's context has the first recipe. A layer with another recipe enters a context of its own. Delayed scaling
reduces the amax of all layers at once, so it goes with layers in bf16, and with no other recipe.

Of the products of a layer, Transformer Engine computes in high precision

    none                              the recipe
    grad_input and grad_weight        the recipe with `backward_override="high_precision"`
    all                               torch's Linear under autocast, bit for bit that of `bf16-mixed`

It has no layer with a forward in bf16 and a backward in FP8. Delayed scaling has no backward in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from lightning_lowprec.conversion.gemms import ALL_GEMMS, GEMMS, NO_GEMM, InBF16, words
from lightning_lowprec.conversion.recipe_map import FLOAT32, HIGH, RecipeMap
from lightning_lowprec.precision.schedule import Schedule
from lightning_lowprec.te.recipes import ALIGNMENT, field_names, kind_of, make_recipe

BASE: Final = "delayed"
"""The recipe that a mapping of products changes: the default of ``FP8TE``."""
BACKWARD: Final[InBF16] = frozenset({"grad_input", "grad_weight"})


@final
@dataclass(frozen=True, kw_only=True)
class LayerRecipes:
    """The recipes of a model's layers."""

    patterns: RecipeMap
    """Patterns and the names of recipes."""
    made: Mapping[str, Any]
    """Recipe objects of Transformer Engine by name."""

    @property
    def first(self) -> Any:
        """The recipe of the plugin's context."""
        return self.made[self.patterns.names[0]]

    @property
    def identity(self) -> object:
        """A value that can be compared."""
        return self.patterns, tuple(map(str, self.made.values()))

    @property
    def alignments(self) -> dict[str, int]:
        """By name, the number of which the features of a layer must be multiples."""
        return {name: ALIGNMENT.get(kind_of(recipe), 16) for name, recipe in self.made.items()}


def is_per_layer(recipe: Any) -> bool:
    """Return whether ``recipe`` maps patterns to recipes, instead of the fields of one recipe to values."""
    if not isinstance(recipe, Mapping) or not recipe or "recipe" in recipe:
        return False
    values = all(isinstance(value, (str, Mapping)) or hasattr(value, "delayed") for value in recipe.values())
    return values and not set(recipe) & field_names()


def make_layer_recipes(given: Any, options: Mapping[str, Any]) -> LayerRecipes:
    """Return the recipes that a user has written.

    Args:
        given: for which :func:`is_per_layer` is true: by pattern a kind, ``"bf16"``, ``"fp32"``, fields of a recipe
            with ``"recipe"``, or a recipe object.
        options: the fields of one recipe that were given beside it; None means not given.

    Raises:
        ValueError: a value is not valid, delayed scaling is mixed with other recipes, or there are ``options``.
    """
    if beside := next((name for name, value in options.items() if value is not None), None):
        raise ValueError(
            f"`{beside}={options[beside]!r}` is not valid with recipes per layer; write the field into the recipe of a"
            f" pattern: {{'*': {{'recipe': 'current', {beside!r}: ...}}}}."
        )
    made: dict[str, Any] = {}
    names: dict[str, Any] = {}
    for pattern, value in given.items():
        if value in (HIGH, FLOAT32) or (isinstance(value, Mapping) and set(value) <= set(GEMMS)):
            names[pattern] = value
        else:
            recipe = make_recipe(value)
            name = next((name for name, other in made.items() if other == recipe), None) or _free_name(recipe, made)
            made[name], names[pattern] = recipe, name
    made.setdefault(BASE, make_recipe(BASE))
    patterns = RecipeMap.of(names, names=tuple(made), base=BASE)
    _check(patterns, made)
    return LayerRecipes(patterns=patterns, made={name: made[name] for name in patterns.names})


def _free_name(recipe: Any, taken: Mapping[str, Any]) -> str:
    kind = kind_of(recipe)
    names = (kind, *(f"{kind} ({number})" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _check(patterns: RecipeMap, made: Mapping[str, Any]) -> None:
    for pattern, recipe in [entry for entry in patterns.entries if entry[1].name != FLOAT32]:
        reason = refusal(recipe.in_bf16, made[recipe.name or BASE])
        if reason is not None:
            raise ValueError(
                f"`recipe[{pattern!r}]` is not possible: {reason}. A backward in bf16 is"
                " {'recipe': 'current', 'backward_override': 'high_precision'}."
            )
    delayed = [name for name in patterns.names if made[name].delayed()]
    if delayed and len(patterns.names) > 1:
        other = next(name for name in patterns.names if name not in delayed[:1])
        raise ValueError(
            f"`recipe` mixes delayed scaling with {other!r}: delayed scaling reduces the amax of all layers at once, so"
            " it goes with layers in 'bf16' only. Use 'current' in its place."
        )


def refusal(gemms: InBF16, recipe: Any) -> str | None:
    """Return why Transformer Engine cannot compute these products in high precision, and the remedy; None if it can."""
    if gemms in (NO_GEMM, ALL_GEMMS):
        return None
    if gemms != BACKWARD:
        return (
            f"Transformer Engine has no layer with {words(gemms)} and the rest in FP8. Use 'bf16' (all GEMMs),"
            " {'grad_input': 'bf16', 'grad_weight': 'bf16'}, or FP8TorchAO"
        )
    if recipe.delayed():
        return "delayed scaling has no backward GEMMs in high precision. Use `recipe='current'`, or 'bf16' (all GEMMs)"
    return None


def check_phases(schedule: Schedule, recipes: Iterable[Any]) -> None:
    """Raise ValueError if a phase cannot be computed with one of the recipes; see :func:`refusal`."""
    for number, phase in enumerate(schedule.phases):
        for recipe in recipes:
            if (reason := refusal(phase.in_bf16, recipe)) is not None:
                raise ValueError(f"`schedule[{number}]['gemms']` is not possible: {reason}.")
            if recipe.backward_override is not None:
                schedule.check_fp8(BACKWARD, f"backward_override={recipe.backward_override!r}")
