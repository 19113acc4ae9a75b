"""Make recipes of Transformer Engine (2.20) from plain values, and check every field: it ignores unknown ones silently.

A ``CustomRecipe`` asks a function of the user for the quantizer of every tensor; it can only be given as an object.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, get_args

from lightning_lowprec.checks import check_integer
from lightning_lowprec.extras import require
from lightning_lowprec.runs_where import RecipeKey

MODULE: Final = "transformer_engine.pytorch"
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
ALIGNMENT: Final[dict[str, int]] = {"mxfp8": 32, "nvfp4": 32}
"""By kind, the number of which tokens, in_features and out_features must be multiples; 16 for all other kinds."""
_OF_1X: Final = {
    "interval": "Transformer Engine 2.x renews the scales at every step",
    "override_linear_precision": "for both backward GEMMs in high precision, write {'recipe': 'current',"
    " 'backward_override': 'high_precision'}",
}
"""Fields of Transformer Engine 1.x, and their remedies."""


def make_recipe(recipe: Any, **options: Any) -> Any:
    """Return a recipe object of Transformer Engine.

    Args:
        recipe: one of ``KINDS``, a mapping of fields with ``"recipe"`` naming the kind, or a recipe object.
        options: more fields; None means not given.

    Raises:
        ValueError: a kind, field or value that the recipe does not have.
        ImportError: Transformer Engine is not installed, or does not import.
    """
    module = require("transformer_engine.common.recipe", "FP8TE")
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(recipe, module.Recipe):
        if given:
            raise ValueError(
                f"{_named(given)} with a recipe object is not valid: set it in the object, or give the recipe by name"
                f" ({', '.join(KINDS)})."
            )
        return _checked(recipe)
    if isinstance(recipe, Mapping):
        fields = dict(recipe)
        recipe = fields.pop("recipe", "delayed")
        if twice := fields.keys() & given.keys():
            raise ValueError(f"`{sorted(twice)[0]}` is given both in `recipe={{...}}` and beside it.")
        given = fields | given
    if recipe not in KINDS:
        expected = f"{', '.join(map(repr, KINDS))}, a mapping, or a recipe object of Transformer Engine"
        raise ValueError(f"`recipe={recipe!r}` is not valid; expected one of: {expected}.")
    cls = getattr(module, _CLASSES[recipe])
    fields = {name: value for name, value in given.items() if value is not None}
    _check_names(recipe, fields, module)
    if "fp8_format" in fields:
        fields["fp8_format"] = _format(fields["fp8_format"], module.Format)
    try:
        made = _with_scale_flags(cls(**fields))
    except (AssertionError, ValueError, TypeError) as error:
        values = _named({name: given[name] for name in given if name in fields} or fields)
        raise ValueError(f"{values} is not valid for `recipe={recipe!r}`: {_reason(error)}") from error
    return _checked(made)


def _checked(recipe: Any) -> Any:
    """Return a recipe object; raise a ValueError for a history without a step, which Transformer Engine accepts."""
    if hasattr(recipe, "amax_history_len"):
        check_integer("amax_history_len", recipe.amax_history_len, least=1)
    return recipe


def _with_scale_flags(made: Any) -> Any:
    """Apply ``use_power_2_scales`` and ``use_f32_scales``, which Transformer Engine reads at import only."""
    for flag, power_2_scale in (("use_power_2_scales", True), ("use_f32_scales", False)):
        if hasattr(made, flag):
            wanted = getattr(made, flag) == power_2_scale
            for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
                setattr(made, name, dataclasses.replace(getattr(made, name), power_2_scale=wanted))
    return made


def field_names() -> set[str]:
    """Return the names of the fields of all recipes."""
    module = require("transformer_engine.common.recipe", "FP8TE")
    return {field.name for cls in _CLASSES.values() for field in dataclasses.fields(getattr(module, cls))}


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

    Raises:
        ValueError: the function returned a request (``DelayedScalingRequest``) in the place of a quantizer.
    """
    from lightning_lowprec.private import transformer_engine

    for fqn, layer in layers:
        for role, request in transformer_engine.requests_for_state(layer, recipe.qfactory):
            raise ValueError(
                f"The `qfactory` of the CustomRecipe returns a {type(request).__name__} for {fqn!r} ({role}): scales"
                " with a history are kept for `FP8TE('delayed')` only. Use that, or return a quantizer that scales by"
                " the tensor at hand (`current_scaling_factory` of Transformer Engine's custom recipes)."
            )


def _check_names(kind: Kind, fields: Mapping[str, Any], module: Any) -> None:
    names = {kind: [f.name for f in dataclasses.fields(getattr(module, cls))] for kind, cls in _CLASSES.items()}
    known = names[kind]
    for name in fields.keys() - set(known):
        if name in _OF_1X:
            raise ValueError(f"`{name}={fields[name]!r}` is gone: {_OF_1X[name]}. Leave the field out.")
        elsewhere = [other for other, others in names.items() if name in others]
        if elsewhere:
            raise ValueError(
                f"`{name}={fields[name]!r}` is not valid with `recipe={kind!r}`; it goes with {', '.join(elsewhere)}."
            )
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`{name}` is no field of `recipe={kind!r}`, which has: {', '.join(sorted(known))}.{hint}")


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
