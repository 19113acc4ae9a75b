"""Convert the layers of a model to Transformer Engine's, in place; convert them again with other settings; revert them.

Importing this module imports no Transformer Engine; converting a model does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from torch import nn

from lightning_lowprec.conversion.invariants import unchanged
from lightning_lowprec.conversion.matmuls import matmuls
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.plan import Plan, make_plan
from lightning_lowprec.conversion.selection import matches
from lightning_lowprec.private import transformer_engine
from lightning_lowprec.te import delayed_scaling, fusion
from lightning_lowprec.te.recipes import CUSTOM, EXPERT_ALIGNMENT, alignment_of, check_custom, kind_of
from lightning_lowprec.te.support import pytorch
from lightning_lowprec.te.wire_format import wire_format_of

_OURS: Final = "lightning_lowprec.te."
"""The package of every class that a converted layer has."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The user's choices for a conversion."""

    recipe: Any
    """A recipe object of Transformer Engine."""
    layers: LayerOptions
    norms: bool
    """Whether norms convert."""
    fuse: bool
    """Whether norms with the layers behind them, MLPs and experts become single calls where they are recognised."""
    fp8_eval: bool
    """Whether evaluation runs in FP8 too."""
    weight_cache: bool | Literal["always"]
    """Whether quantised weights are kept; see :func:`lightning_lowprec.te.linear.convert_linear`."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The layers that a conversion converts, and the layers that it keeps with the reason."""

    linears: Plan
    norms: Mapping[str, str | None]
    """By fqn: the reason why a norm stays; None if the norm converts."""
    fusion: fusion.Fusion | None = None
    """The layers that became single calls; None if fusion was not asked for."""

    @property
    def converts(self) -> bool:
        """Whether anything runs in FP8."""
        return bool(self.linears.converted or (self.fusion is not None and self.fusion.fused))

    @property
    def converted_norms(self) -> tuple[str, ...]:
        """The fqns of the norms that convert."""
        return tuple(fqn for fqn, reason in self.norms.items() if reason is None)

    def summary(self) -> str:
        """Return one line about the Linears, the norms and the fusion."""
        text = self.linears.summary() + self._norms_summary()
        return text if self.fusion is None else f"{text}; {self.fusion.summary()}"

    def _norms_summary(self) -> str:
        if not self.norms:
            return ""
        text = f"; {len(self.converted_norms)} of {len(self.norms)} norms"
        kept = [f"{fqn!r} {reason}" for fqn, reason in self.norms.items() if reason is not None]
        return text + (f" (kept: {kept[0]}{f' and {len(kept) - 1} more' if len(kept) > 1 else ''})" if kept else "")


def choose(model: nn.Module, options: LayerOptions, *, alignment: int, with_norms: bool) -> Choice:
    """Choose the layers of ``model`` that convert: Linears by the plan of all backends, norms by the same names.

    Args:
        model: on any device, meta too.
        options: ``keep`` and ``only`` may name norms as well as Linears.
        alignment: the number of which a Linear's features must be multiples.
        with_norms: whether norms convert at all.

    Raises:
        ValueError: a name or pattern that matches neither a Linear nor a norm.
    """
    from lightning_lowprec.te.norms import NO_NORM, reason_to_keep

    reasons = {fqn: reason_to_keep(module) for fqn, module in model.named_modules()} if with_norms else {}
    reasons = {fqn: reason for fqn, reason in reasons.items() if reason != NO_NORM}
    for pattern in options.keep:
        reasons |= {fqn: f"kept by {pattern!r}" for fqn in reasons if matches(pattern, fqn)}
    if options.only is not None:
        chosen = {fqn for pattern in options.only for fqn in reasons if matches(pattern, fqn)}
        reasons |= dict.fromkeys(reasons.keys() - chosen, "not in `only`")
    stacks = [matmul.fqn for matmul, _ in matmuls(model) if matmul.kind == "stacked experts"]
    linears = _options_for_linears(model, options, [*reasons, *stacks])
    return Choice(linears=make_plan(model, linears, alignment=alignment), norms=reasons)


def _options_for_linears(model: nn.Module, options: LayerOptions, others: Collection[str]) -> LayerOptions:
    """Drop the patterns that match ``others`` and no Linear: a plan raises for a pattern that matches no Linear."""
    fqns = [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)]

    def is_for_linears(pattern: str) -> bool:
        return any(matches(pattern, fqn) for fqn in fqns) or not any(matches(pattern, fqn) for fqn in others)

    only = None if options.only is None else [pattern for pattern in options.only if is_for_linears(pattern)]
    return replace(options, keep=[pattern for pattern in options.keep if is_for_linears(pattern)], only=only)


def convert_model(model: nn.Module, settings: Settings) -> Choice:
    """Convert ``model`` in place; layers that were converted before keep their scales.

    Returns:
        The layers that were converted and the layers that were kept.

    Raises:
        ValueError: a name in the options that matches nothing, or a CustomRecipe that asks for delayed scaling.
        ImportError: Transformer Engine is not installed, does not import, or lacks names that this package uses.
        RuntimeError: Transformer Engine found no CUDA.
    """
    pytorch("FP8TE")
    from lightning_lowprec.te import linear, norms

    kind, alignment = kind_of(settings.recipe), alignment_of(settings.recipe)
    before = delayed_scaling.saved_scales(scaled_layers(model))
    with unchanged(model):
        fusion.unfuse(model)
        if settings.fuse:  # fusion recognises torch's own layers only
            linear.revert_linears(model)
            norms.revert_norms(model)
        found = choose(model, settings.layers, alignment=alignment, with_norms=settings.norms)
        if settings.fuse:
            found = replace(found, fusion=_fuse(model, found, settings, kind))
        handled: Collection[str] = found.fusion.handled if found.fusion is not None else ()
        linear.convert_linears(
            model,
            [fqn for fqn in found.linears.converted if fqn not in handled],
            fp8_eval=settings.fp8_eval,
            token_alignment=alignment,
            weight_cache=settings.weight_cache,
            wire_format=wire_format_of(settings.recipe),
            custom=kind == CUSTOM,
        )
        norms.convert_norms(model, [fqn for fqn in found.converted_norms if fqn not in handled])
    if kind == CUSTOM:
        check_custom(settings.recipe, scaled_layers(model))
    delayed_scaling.checkpoint_by_te(model, wanted=kind == "delayed")
    if before and kind == "delayed":
        delayed_scaling.restore_scales(scaled_layers(model), before, settings.recipe)
    return found


def _fuse(model: nn.Module, found: Choice, settings: Settings, kind: str) -> fusion.Fusion:
    keep, only = settings.layers.keep, settings.layers.only
    stacks = [row.fqn for row in found.linears.rows if row.kind == "stacked experts"]
    experts = [
        fqn
        for fqn in stacks
        if not any(matches(pattern, fqn) for pattern in keep)
        and (only is None or any(matches(pattern, fqn) for pattern in only))
    ]
    return fusion.fuse(
        model,
        may_convert=[*(found.linears.converted if settings.norms else ()), *experts],
        kept_norms=[fqn for fqn, reason in found.norms.items() if reason is not None],
        token_alignment=alignment_of(settings.recipe),
        feature_alignment=alignment_of(settings.recipe),
        expert_alignment=EXPERT_ALIGNMENT.get(kind, 16),
        whole_mlp=settings.recipe.backward_override is None,
        fp8_eval=settings.fp8_eval,
    )


def revert(model: nn.Module) -> None:
    """Give ``model`` torch's own layers back, in place; a model that was never converted imports no Transformer Engine.

    Layers of Transformer Engine that the user built stay.
    """
    if any(cls.__module__.startswith(_OURS) for module in model.modules() for cls in type(module).__mro__):
        from lightning_lowprec.te import linear, norms

        fusion.unfuse(model)
        linear.revert_linears(model)
        norms.revert_norms(model)
    delayed_scaling.checkpoint_by_te(model, wanted=False)


def scaled_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every layer of Transformer Engine that may keep scales, with its fqn.

    These are our layers, layers of Transformer Engine that the user built, and the engines of fused layers.
    """
    for fqn, module in model.named_modules():
        if transformer_engine.is_layer(module):
            yield fqn, module
    yield from fusion.engines(model).items()
