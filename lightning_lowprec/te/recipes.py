"""Make recipes of Transformer Engine (2.20) from plain values, and check every field: it ignores unknown ones silently.

Two fields of Transformer Engine 1.x are taken where 2.x does the same, and refused otherwise: ``interval`` (2.x renews
scales at every step) and ``override_linear_precision`` (2.x calls it ``backward_override``).

A ``CustomRecipe`` asks a function of the user for the quantizer of every tensor; it can only be given as an object.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, get_args

from lightning_lowprec.extras import require
from lightning_lowprec.private import transformer_engine

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
"""The kind of a ``CustomRecipe``."""
_FORMATS: Final = {"hybrid": "HYBRID", "e4m3": "E4M3"}
_BACKWARD_OVERRIDES: Final = {(False, False, False): None, (False, True, True): "high_precision"}
"""``backward_override`` by ``override_linear_precision``: whether (fprop, dgrad, wgrad) run in high precision."""
ALIGNMENT: Final[dict[str, int]] = {"mxfp8": 32, "nvfp4": 32}
"""By kind, the number of which tokens, in_features and out_features must be multiples; 16 for all other kinds."""
EXPERT_ALIGNMENT: Final[dict[str, int]] = {"mxfp8": 32, "nvfp4": 128}
"""The same number for the rows of each expert in a grouped GEMM."""
_GROUPED_ALIGNMENT: Final = 128
"""The default ``quantization_alignment`` of a CustomRecipe: enough for grouped GEMMs of every format."""


def make_recipe(recipe: Any, **options: Any) -> Any:
    """Return a recipe object of Transformer Engine.

    Args:
        recipe: one of ``KINDS``; a mapping of a recipe's fields, with ``"recipe"`` naming the kind; or a recipe object,
            which is returned unchanged.
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
        return recipe
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
    fields = _replace_fields_of_1x(recipe, given)
    _check_names(recipe, cls, fields, module)
    if "fp8_format" in fields:
        fields["fp8_format"] = _format(fields["fp8_format"], module.Format)
    try:
        return _with_scale_flags(cls(**fields))
    except (AssertionError, ValueError, TypeError) as error:
        values = _named({name: given[name] for name in given if name in fields} or fields)
        raise ValueError(f"{values} is not valid for `recipe={recipe!r}`: {_reason(error)}") from error


def _with_scale_flags(made: Any) -> Any:
    """Apply ``use_power_2_scales`` and ``use_f32_scales``, which Transformer Engine reads at import only."""
    flags = {"use_power_2_scales": True, "use_f32_scales": False}
    for flag, power_2_scale in flags.items():
        if hasattr(made, flag):
            wanted = getattr(made, flag) == power_2_scale
            for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
                setattr(made, name, dataclasses.replace(getattr(made, name), power_2_scale=wanted))
    return made


def kind_of(recipe: Any) -> str:
    """Return the kind of a recipe object: one of ``KINDS``, ``CUSTOM``, or else the name of the class."""
    name = type(recipe).__name__
    if name == "CustomRecipe":
        return CUSTOM
    return next((kind for kind, cls in _CLASSES.items() if cls == name), name)


def alignment_of(recipe: Any) -> int:
    """Return the number of which tokens, in_features and out_features of a Linear must be multiples.

    Args:
        recipe: an object of Transformer Engine. A CustomRecipe has the number as ``quantization_alignment``; if the
            user has not set it, the number is 32, enough for every format of Transformer Engine.
    """
    kind = kind_of(recipe)
    if kind != CUSTOM:
        return ALIGNMENT.get(kind, 16)
    return 32 if recipe.quantization_alignment == _GROUPED_ALIGNMENT else math.lcm(16, recipe.quantization_alignment)


def check_custom(recipe: Any, layers: Iterable[tuple[str, Any]]) -> None:
    """Refuse a CustomRecipe that asks for scales with a history: they would neither be saved nor renewed.

    Args:
        recipe: a CustomRecipe. Its function is called for the roles of every layer, as the first forward will do again.
            A role has a ``module_type``, a ``tensor_type`` and a ``name``.
        layers: the fqns and the layers of Transformer Engine that will run with the recipe.

    Raises:
        ValueError: the function returned a request (``DelayedScalingRequest``) in the place of a quantizer.
    """
    for fqn, layer in layers:
        for role, request in transformer_engine.requests_for_state(layer, recipe.qfactory):
            raise ValueError(
                f"The `qfactory` of the CustomRecipe returns a {type(request).__name__} for {fqn!r} ({role}): scales"
                " with a history are kept for `FP8TE('delayed')` only. Use that, or return a quantizer that scales by"
                " the tensor at hand (`current_scaling_factory` of Transformer Engine's custom recipes)."
            )


def _replace_fields_of_1x(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in given.items() if value is not None}
    interval = fields.pop("interval", 1)
    if interval != 1:
        raise ValueError(
            f"`interval={interval!r}` is gone: Transformer Engine 2.x renews the scales at every step. Leave it out."
        )
    override = fields.pop("override_linear_precision", None)
    if override is None:
        return fields
    if tuple(override) not in _BACKWARD_OVERRIDES:
        raise ValueError(
            f"`override_linear_precision={override!r}` is not valid; expected (False, True, True) or (False, False,"
            " False): Transformer Engine 2.x has high precision for both backward GEMMs or none. For the weight"
            " gradient alone in high precision use `precision='fp8-rowwise-gw-hp'`; for whole layers `keep=[...]`."
        )
    backward = _BACKWARD_OVERRIDES[tuple(override)]
    if backward is not None and kind == "delayed":
        raise ValueError(
            f"`override_linear_precision={override!r}` is not valid with delayed scaling, which has no backward"
            " GEMMs in high precision. Use `recipe='current'`."
        )
    return fields if backward is None else fields | {"backward_override": backward}


def _check_names(kind: Kind, cls: type, fields: Mapping[str, Any], module: Any) -> None:
    known = {field.name for field in dataclasses.fields(cls)}
    for name in fields:
        if name in known:
            continue
        elsewhere = [
            other for other, c in _CLASSES.items() if name in {f.name for f in dataclasses.fields(getattr(module, c))}
        ]
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
    name = _FORMATS.get(str(value).lower())
    if name is None:
        also = " (weights and activations in e5m2 do not train)" if str(value).lower() == "e5m2" else ""
        raise ValueError(f"`fp8_format={value!r}` is not valid; expected one of: {', '.join(_FORMATS)}{also}.")
    return formats[name]


def _named(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in fields.items())


def _reason(error: BaseException) -> str:
    """Return the first line of an assertion, or the first finding of pydantic."""
    findings = getattr(error, "errors", None)
    if callable(findings):
        first = findings()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
