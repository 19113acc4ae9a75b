"""Make recipes of Transformer Engine (2.20) from plain values, for a model or per layer, and check every field.

Transformer Engine ignores unknown fields silently. A ``CustomRecipe`` asks a function of the user for the quantizer of
every tensor; it can only be given as an object.

Recipes per layer: the plugin's context has the first recipe, and a layer with another recipe enters a context of its
own. Delayed scaling reduces the amax of all layers at once, so it goes with layers in bf16, and with no other recipe.
Of the products of a layer, Transformer Engine computes in high precision

    none                              the recipe
    grad_input and grad_weight        the recipe with `backward_override="high_precision"`
    all                               torch's Linear under autocast, bit for bit that of `bf16-mixed`

It has no layer with a forward in bf16 and a backward in FP8. Delayed scaling has no backward in bf16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeGuard, final, get_args

from lightning_lowprec.checks import check_integer
from lightning_lowprec.conversion.recipe_map import ALL_GEMMS, FLOAT32, GEMMS, HIGH, NO_GEMM, InBF16, RecipeMap, words
from lightning_lowprec.extras import require
from lightning_lowprec.runs_where import RecipeKey

if TYPE_CHECKING:
    from lightning_lowprec.precision.schedule import Schedule

MODULE: Final = "transformer_engine.pytorch"
_RECIPES: Final = "transformer_engine.common.recipe"
Kind = Literal["delayed", "current", "block", "mxfp8", "nvfp4"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
_CLASSES: Final[dict[Kind, str]] = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
CUSTOM: Final = "custom"
HIGH_PRECISION: Final = "high precision"
"""In place of a recipe: no product of a layer runs in FP8."""
BASE: Final = "delayed"
"""The recipe that a mapping of products changes: the default of ``FP8TE``."""
BACKWARD: Final[InBF16] = frozenset({"grad_input", "grad_weight"})
ALIGNMENT: Final[dict[str, int]] = {"mxfp8": 32, "nvfp4": 32}
"""By kind, the number of which tokens, in_features and out_features must be multiples; 16 for all other kinds."""


def make_recipe(recipe: Any, **options: Any) -> Any:
    """Return a recipe object of Transformer Engine.

    Args:
        recipe: one of ``KINDS``, a mapping of fields with ``"recipe"`` naming the kind, or a recipe object.
        options: more fields; None means not given.

    Raises:
        ValueError: a kind, field or value that the recipe does not have.
        ImportError: Transformer Engine is not installed, or does not import.
    """
    module = require(_RECIPES, "FP8TE")
    fields = {name: value for name, value in options.items() if value is not None}
    if isinstance(recipe, module.Recipe):
        if fields:
            raise ValueError(
                f"{_named(fields)} with a recipe object is not valid: set it in the object, or give the recipe by name"
                f" ({', '.join(KINDS)})."
            )
        return _checked(recipe)
    if isinstance(recipe, Mapping):
        if twice := recipe.keys() & fields.keys():
            raise ValueError(f"`{sorted(twice)[0]}` is given both in `recipe={{...}}` and beside it.")
        fields = {name: value for name, value in recipe.items() if name != "recipe" and value is not None} | fields
        recipe = recipe.get("recipe", "delayed")
    if recipe not in KINDS:
        expected = f"{', '.join(map(repr, KINDS))}, a mapping, or a recipe object of Transformer Engine"
        raise ValueError(f"`recipe={recipe!r}` is not valid; expected one of: {expected}.")
    _check_names(recipe, fields)
    words_of_user = _named(fields)
    if "fp8_format" in fields:
        fields["fp8_format"] = _format(fields["fp8_format"], module.Format)
    try:
        recipe_object = _with_scale_flags(getattr(module, _CLASSES[recipe])(**fields))
    except (AssertionError, ValueError, TypeError) as error:
        raise ValueError(f"{words_of_user} is not valid for `recipe={recipe!r}`: {_reason(error)}") from error
    return _checked(recipe_object)


def _checked(recipe: Any) -> Any:
    """Return a recipe object; raise a ValueError for a history without a step, which Transformer Engine accepts."""
    if hasattr(recipe, "amax_history_len"):
        check_integer("amax_history_len", recipe.amax_history_len, least=1)
    return recipe


def _with_scale_flags(recipe: Any) -> Any:
    """Apply ``use_power_2_scales`` and ``use_f32_scales``, which Transformer Engine reads at import only."""
    for flag, power_2_scale in (("use_power_2_scales", True), ("use_f32_scales", False)):
        if hasattr(recipe, flag):
            wanted = getattr(recipe, flag) == power_2_scale
            for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
                setattr(recipe, name, dataclasses.replace(getattr(recipe, name), power_2_scale=wanted))
    return recipe


def _fields_of_kinds() -> dict[Kind, list[str]]:
    module = require(_RECIPES, "FP8TE")
    return {kind: [field.name for field in dataclasses.fields(getattr(module, cls))] for kind, cls in _CLASSES.items()}


def _check_names(kind: Kind, fields: Mapping[str, Any]) -> None:
    names = _fields_of_kinds()
    for name in fields.keys() - set(names[kind]):
        if elsewhere := [other for other, others in names.items() if name in others]:
            raise ValueError(
                f"`{name}={fields[name]!r}` is not valid with `recipe={kind!r}`; it goes with {', '.join(elsewhere)}."
            )
        raise ValueError(f"`{name}` is no field of `recipe={kind!r}`, which has: {', '.join(sorted(names[kind]))}.")


def _format(value: Any, formats: Any) -> Any:
    if isinstance(value, formats):
        return value
    name = str(value).lower()
    if name not in ("hybrid", "e4m3"):
        also = " (weights and activations in e5m2 do not train)" if name == "e5m2" else ""
        raise ValueError(f"`fp8_format={value!r}` is not valid; expected one of: hybrid, e4m3{also}.")
    return formats[name.upper()]


def _named(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in fields.items())


def _reason(error: BaseException) -> str:
    """Return the first line of an assertion, or the first finding of pydantic."""
    findings = getattr(error, "errors", None)
    if callable(findings):
        first = findings()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# ---- what is asked of a recipe object


def kind_of(recipe: Any) -> str:
    """Return the kind of a recipe object: one of ``KINDS``, ``CUSTOM``, or else the name of the class."""
    kinds = {cls: kind for kind, cls in _CLASSES.items()} | {"CustomRecipe": CUSTOM}
    return kinds.get(type(recipe).__name__, type(recipe).__name__)


def hardware_recipe(recipe: Any) -> RecipeKey | None:
    """Return the row of a recipe object in the table of what runs where; None for a class that the table lacks."""
    kind = kind_of(recipe)
    if kind == "nvfp4" and recipe.disable_rht and recipe.disable_stochastic_rounding:
        return "te-nvfp4-plain"
    row: RecipeKey | None = f"te-{kind}" if kind in KINDS else None  # type: ignore[assignment]
    return row


def alignment_of(recipe: Any) -> int:
    """Return the number of which tokens, in_features and out_features of a Linear must be multiples.

    A CustomRecipe has the number as ``quantization_alignment``; if the user has not set it, the number is 32, enough
    for every format of Transformer Engine.
    """
    kind = kind_of(recipe)
    if kind != CUSTOM:
        return ALIGNMENT.get(kind, 16)
    number = recipe.quantization_alignment
    return 32 if number == 128 else math.lcm(16, number)  # 128 is the default, for grouped GEMMs of every format


def check_custom(recipe: Any, layers: Iterable[tuple[str, Any]]) -> None:
    """Refuse a CustomRecipe that asks for scales with a history: they would neither be saved nor renewed.

    The recipe's function is called for the roles of every layer, as the first forward will do again.
    """
    from lightning_lowprec.private import transformer_engine

    for fqn, layer in layers:
        for role, request in transformer_engine.requests_for_state(layer, recipe.qfactory):
            raise ValueError(
                f"The `qfactory` of the CustomRecipe returns a {type(request).__name__} for {fqn!r} ({role}): scales"
                " with a history are kept for `FP8TE('delayed')` only. Use that, or return a quantizer that scales by"
                " the tensor at hand (`current_scaling_factory` of Transformer Engine's custom recipes)."
            )


# ---- recipes per layer


@final
@dataclasses.dataclass(frozen=True)
class LayerRecipes:
    """The recipes of a model's layers."""

    patterns: RecipeMap
    """Patterns and the names of recipes."""
    by_name: Mapping[str, Any]
    """Recipe objects of Transformer Engine; the first is that of the plugin's context."""

    @property
    def alignments(self) -> dict[str, int]:
        """By name, the number of which the features of a layer must be multiples."""
        return {name: ALIGNMENT.get(kind_of(recipe), 16) for name, recipe in self.by_name.items()}


def is_per_layer(recipe: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether ``recipe`` maps patterns to recipes, instead of the fields of one recipe to values."""
    if not isinstance(recipe, Mapping) or not recipe or "recipe" in recipe:
        return False
    values = all(isinstance(value, (str, Mapping)) or hasattr(value, "delayed") for value in recipe.values())
    return values and not any(recipe.keys() & set(names) for names in _fields_of_kinds().values())


def make_layer_recipes(entries: Any, options: Mapping[str, Any]) -> LayerRecipes:
    """Return the recipes that a user has written: by pattern a kind, "bf16", "fp32", fields, or a recipe object.

    ``options`` are the fields of one recipe that were given beside ``entries``; any that is not None raises.
    """
    if beside := next((name for name, value in options.items() if value is not None), None):
        raise ValueError(
            f"`{beside}={options[beside]!r}` is not valid with recipes per layer; write the field into the recipe of a"
            f" pattern: {{'*': {{'recipe': 'current', {beside!r}: ...}}}}."
        )
    by_name: dict[str, Any] = {}
    names: dict[str, Any] = {}
    for pattern, value in entries.items():
        if value in (HIGH, FLOAT32) or (isinstance(value, Mapping) and set(value) <= set(GEMMS)):
            names[pattern] = value
            continue
        recipe = make_recipe(value)
        name = next((name for name, other in by_name.items() if other == recipe), None)
        if name is None:
            alike = sum(kind_of(other) == kind_of(recipe) for other in by_name.values())
            name = f"{kind_of(recipe)} ({alike + 1})" if alike else kind_of(recipe)
        by_name[name] = recipe
        names[pattern] = name
    by_name.setdefault(BASE, make_recipe(BASE))
    patterns = RecipeMap.of(names, names=tuple(by_name), base=BASE)
    _check_layer_recipes(patterns, by_name)
    return LayerRecipes(patterns, {name: by_name[name] for name in patterns.names})


def _check_layer_recipes(patterns: RecipeMap, by_name: Mapping[str, Any]) -> None:
    for pattern, recipe in patterns.entries:
        reason = None if recipe.name == FLOAT32 else refusal(recipe.in_bf16, by_name[recipe.name or BASE])
        if reason is not None:
            raise ValueError(
                f"`recipe[{pattern!r}]` is not possible: {reason}. A backward in bf16 is"
                " {'recipe': 'current', 'backward_override': 'high_precision'}."
            )
    delayed = [name for name in patterns.names if by_name[name].delayed()]
    if delayed and len(patterns.names) > 1:
        other = next(name for name in patterns.names if name != delayed[0])
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
