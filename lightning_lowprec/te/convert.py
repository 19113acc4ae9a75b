"""Convert the layers of a model to Transformer Engine's, in place, also again with other options; revert them."""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from lightning_lowprec.conversion import in_place, module_dtypes
from lightning_lowprec.conversion.matmuls import linears
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.plan import IN_METRIC, Plan, PlanRequest, make_plan
from lightning_lowprec.conversion.selection import in_metrics, matches
from lightning_lowprec.te import delayed_scaling
from lightning_lowprec.te.recipes import kind_of


def choose(model: nn.Module, options: LayerOptions, request: PlanRequest, *, norms: bool) -> Plan:
    """Choose the layers of ``model`` that convert: Linears by the plan of all backends, norms by the same names.

    A name or pattern in the options that matches neither a Linear nor experts nor a norm raises ValueError.
    """
    from lightning_lowprec.te.norms import NO_NORM, reason_to_keep

    inside, names = in_metrics(model), linears(model)
    reasons = {
        fqn: _kept_by_user(fqn, options) or reason or (IN_METRIC if fqn in inside else None)
        for fqn, module in (dict(model.named_modules()) if norms else {}).items()
        if (reason := reason_to_keep(module)) != NO_NORM
    }

    def is_for_linears(pattern: str) -> bool:  # a plan raises for a pattern that matches none
        return any(matches(pattern, fqn) for fqn in names) or not any(matches(pattern, fqn) for fqn in reasons)

    keep = list(filter(is_for_linears, options.keep))
    only = None if options.only is None else list(filter(is_for_linears, options.only))
    return replace(make_plan(model, replace(options, keep=keep, only=only), request), norms=reasons)


def _kept_by_user(fqn: str, options: LayerOptions) -> str | None:
    """Return the reason why the user keeps a norm in high precision, or None."""
    if options.only is not None and not any(matches(pattern, fqn) for pattern in options.only):
        return "not in `only`"
    return next((f"kept by {pattern!r}" for pattern in reversed(options.keep) if matches(pattern, fqn)), None)


def convert_model(model: nn.Module, plan: Plan, recipe: object, *, fp8_eval: bool, keep_weights: bool) -> None:
    """Convert ``model`` in place as ``plan`` says. Layers that were converted keep their scales."""
    from lightning_lowprec.te.layer import convert_linears
    from lightning_lowprec.te.norms import convert_norms

    is_delayed = kind_of(recipe) == "delayed"
    before = delayed_scaling.saved_scales(scaled_layers(model))
    with in_place.unchanged(model):
        convert_linears(model, plan.converted, recipe, fp8_eval=fp8_eval, keep_weights=keep_weights)
        convert_norms(model, [fqn for fqn, reason in plan.norms.items() if reason is None])
    module_dtypes.run_in_float32(model, plan)
    delayed_scaling.checkpoint_by_te(model, wanted=is_delayed)
    if is_delayed and before:
        delayed_scaling.restore_scales(scaled_layers(model), before, recipe)


def revert(model: nn.Module) -> None:
    """Give ``model`` torch's own layers back, in place; layers of Transformer Engine that the user built stay."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    if any(cls.__module__.startswith("lightning_lowprec.te.") for cls in classes):
        from lightning_lowprec.te.layer import te_linears
        from lightning_lowprec.te.norms import convert_norms

        for layer in te_linears(model):
            in_place.revert(layer)
        convert_norms(model, ())
    delayed_scaling.checkpoint_by_te(model, wanted=False)


def scaled_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all layers of Transformer Engine that may keep scales, ours and the user's."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    for fqn, module in model.named_modules():
        if isinstance(module, TransformerEngineBaseModule):
            yield fqn, module
