"""Make recipes of Transformer Engine (2.20) from plain values, and check every field.

Transformer Engine ignores unknown fields silently.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from lightning_lowprec.checks import check_integer
from lightning_lowprec.extras import require
from lightning_lowprec.gone import VALUES, gone

if TYPE_CHECKING:
    from lightning_lowprec.numerics.weight_rounding import WeightRounding

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
ALIGNMENT: Final[dict[str, int]] = {"mxfp8": 32, "nvfp4": 32}
"""By kind, the number of which tokens, in_features and out_features must be multiples; 16 for all other kinds."""


def make_recipe(recipe: Any, **options: object) -> Any:
    """Return a recipe object of one of ``KINDS``, or of a mapping with the kind as ``"recipe"``, or as it was given.

    ``options`` are more fields, None: not given. A kind, field or value that does not exist raises ValueError.
    """
    module = require(_RECIPES, "FP8TE")
    fields = {name: value for name, value in options.items() if value is not None}
    if isinstance(recipe, module.CustomRecipe):
        raise ValueError(gone("CustomRecipe", VALUES["recipe"]))
    if isinstance(recipe, module.Recipe):
        if fields:
            raise ValueError(
                f"{_named(fields)} with a recipe object is not valid: set it in the object, or give the recipe by name"
                f" ({', '.join(KINDS)})."
            )
    else:
        recipe = _of_fields(module, *_kind_and_fields(recipe, fields))
    if hasattr(recipe, "amax_history_len"):  # Transformer Engine accepts a history without a step
        check_integer("amax_history_len", recipe.amax_history_len, least=1)
    return recipe


def _kind_and_fields(recipe: Any, fields: dict[str, object]) -> tuple[Kind, dict[str, object]]:
    """Return the kind and all fields of a recipe by name or mapping, beside which ``fields`` are given."""
    if isinstance(recipe, Mapping):
        if twice := recipe.keys() & fields.keys():
            raise ValueError(f"`{sorted(twice)[0]}` is given both in `recipe={{...}}` and beside it.")
        values = recipe.values()
        if "recipe" not in recipe and any(isinstance(v, Mapping) or v in (*KINDS, "bf16", "fp32") for v in values):
            raise ValueError(gone("{pattern: recipe}", VALUES["recipe"]))
        fields = {name: value for name, value in recipe.items() if name != "recipe" and value is not None} | fields
        recipe = recipe.get("recipe", "delayed")
    if recipe not in KINDS:
        expected = f"{', '.join(map(repr, KINDS))}, a mapping, or a recipe object of Transformer Engine"
        raise ValueError(f"`recipe={recipe!r}` is not valid; expected one of: {expected}.")
    return recipe, fields


def _of_fields(module: Any, kind: Kind, fields: dict[str, Any]) -> Any:
    """Return a recipe object with these fields, also those that Transformer Engine reads at its import alone."""
    names = {other: [f.name for f in dataclasses.fields(getattr(module, cls))] for other, cls in _CLASSES.items()}
    for name in fields.keys() - set(names[kind]):
        if elsewhere := [other for other, others in names.items() if name in others]:
            raise ValueError(
                f"`{name}={fields[name]!r}` is not valid with `recipe={kind!r}`; it goes with {', '.join(elsewhere)}."
            )
        raise ValueError(f"`{name}` is no field of `recipe={kind!r}`, which has: {', '.join(sorted(names[kind]))}.")
    words_of_user = _named(fields)
    if "fp8_format" in fields:
        fields["fp8_format"] = _format(fields["fp8_format"], module.Format)
    try:
        recipe = getattr(module, _CLASSES[kind])(**fields)
    except ValueError as error:  # pydantic's, also of a failed assertion
        finding = cast(Any, error).errors()[0]
        reason = f"{'.'.join(map(str, finding['loc']))}: {finding['msg']}"
        raise ValueError(f"{words_of_user} is not valid for `recipe={kind!r}`: {reason}") from error
    for flag, power_2_scale in (("use_power_2_scales", True), ("use_f32_scales", False)):
        if hasattr(recipe, flag):
            wanted = getattr(recipe, flag) == power_2_scale
            for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
                setattr(recipe, name, dataclasses.replace(getattr(recipe, name), power_2_scale=wanted))
    return recipe


def _format(value: object, formats: Any) -> Any:
    name = str(getattr(value, "name", value)).upper()
    if name not in ("HYBRID", "E4M3"):
        also = " (weights and activations in e5m2 do not train)" if name == "E5M2" else ""
        raise ValueError(f"`fp8_format={value!r}` is not valid; expected one of: hybrid, e4m3{also}.")
    return formats[name]


def _named(fields: Mapping[str, object]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in fields.items())


# ---- what is asked of a recipe object


def kind_of(recipe: object) -> str:
    """Return the kind of a recipe object: one of ``KINDS``, or else the name of the class."""
    name = type(recipe).__name__
    return next((kind for kind, cls in _CLASSES.items() if cls == name), name)


def alignment_of(recipe: object) -> int:
    """Return the number of which tokens, in_features and out_features of a Linear must be multiples."""
    return ALIGNMENT.get(kind_of(recipe), 16)


def rounding_of(kind: str) -> "WeightRounding | None":
    """Return how the forward of a recipe rounds weights; None: not per tensor and not per block."""
    from lightning_lowprec.numerics.formats import power_of_two_scale
    from lightning_lowprec.numerics.weight_rounding import WeightRounding, nearest_scale

    if kind == "block":
        return WeightRounding(scale_per="block", scale_of=power_of_two_scale)
    # delayed scaling has older scales while it trains; the scale of the weight at hand is never worse
    return WeightRounding(scale_per="tensor", scale_of=nearest_scale) if kind in ("delayed", "current") else None
