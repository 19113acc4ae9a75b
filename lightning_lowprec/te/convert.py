"""A model's layers become Transformer Engine's, in place; again, with other settings, or with the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

from lightning_lowprec.conversion.invariants import unchanged
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.selection import matches
from lightning_lowprec.te import custom, fusion, linear, norms, scales
from lightning_lowprec.te.choice import Choice, choose
from lightning_lowprec.te.recipes import CUSTOM, EXPERT_ALIGNMENT, alignment_of, kind_of
from lightning_lowprec.te.recompute import checkpoint_by_te
from lightning_lowprec.te.wire_format import wire_format_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user wishes."""

    recipe: Any
    """A recipe object of Transformer Engine."""
    layers: LayerOptions
    norms: bool
    """Whether norms convert."""
    fuse: bool
    """Whether norms, the layers behind them, MLPs and experts become single calls where they are recognised."""
    fp8_eval: bool
    weight_cache: bool | Literal["always"]


def revert(model: nn.Module) -> None:
    """Give ``model`` torch's own layers back, in place."""
    if any(type(m).__module__.startswith("lightning_lowprec.te.") for m in model.modules()):
        fusion.unfuse(model)
        linear.revert_linears(model)
        norms.revert_norms(model)
    checkpoint_by_te(model, wanted=False)


def scaled_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every layer of Transformer Engine that may keep scales, with its fqn.

    These are our layers, layers of Transformer Engine that the user built, and the engines of fused layers.
    """
    for fqn, module in model.named_modules():
        if isinstance(module, TransformerEngineBaseModule):
            yield fqn, module
    yield from fusion.engines(model).items()


def convert_model(model: nn.Module, settings: Settings) -> Choice:
    """Convert ``model`` in place; the scales of layers that were converted before are kept.

    Returns:
        What was converted and what was kept.

    Raises:
        ValueError: a name in the options that matches nothing, or a CustomRecipe that asks for delayed scaling.
        RuntimeError: by Transformer Engine, there is no CUDA.
    """
    kind, alignment = kind_of(settings.recipe), alignment_of(settings.recipe)
    before = scales.saved(scaled_layers(model))
    with unchanged(model):
        fusion.unfuse(model)
        if settings.fuse:  # it takes torch's own layers
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
        custom.check(scaled_layers(model), settings.recipe)
    checkpoint_by_te(model, wanted=kind == "delayed")
    if before and kind == "delayed":
        scales.restore(scaled_layers(model), before, settings.recipe)
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
