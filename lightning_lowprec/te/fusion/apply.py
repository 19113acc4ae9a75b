"""Fusing a model in place, and undoing it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from lightning_lowprec.conversion.invariants import unchanged
from lightning_lowprec.extras import require
from lightning_lowprec.te.fusion import deferred
from lightning_lowprec.te.fusion.deferred import UNIT, FusedLinear, FusedMLP, FusedNorm, is_fused
from lightning_lowprec.te.fusion.families import activation_name
from lightning_lowprec.te.fusion.recognise import Rules, mlp_refusal, refusal, rules
from lightning_lowprec.te.fusion.report import Fusion, FusionRow, Kind
from lightning_lowprec.te.fusion.sites import ExpertsSite, Site, sites


def plan_fusion(
    model: nn.Module,
    *,
    may_convert: Collection[str],
    kept_norms: Collection[str] = (),
    feature_alignment: int = 16,
    whole_mlp: bool = True,
) -> Fusion:
    """What :func:`fuse` would do, without Transformer Engine and without touching the model; its arguments."""
    limits = rules(model, may_convert, kept_norms, feature_alignment, whole_mlp)
    return Fusion(tuple(_row(site, limits) for site in sites(model)))


def fuse(
    model: nn.Module,
    *,
    may_convert: Collection[str],
    kept_norms: Collection[str] = (),
    token_alignment: int = 16,
    feature_alignment: int = 16,
    expert_alignment: int | None = None,
    whole_mlp: bool = True,
    fp8_eval: bool = True,
) -> Fusion:
    """Fuse every place of ``model`` whose structure is recognised exactly, in place.

    Parameters stay what and where they are, so optimizers may exist already.

    Args:
        model: on any device, meta too; before it is sharded or compiled.
        may_convert: fqns of the Linears that may run in FP8, and of the stacked Parameters of experts
            (``"model.layers.0.mlp.experts.gate_up_proj"``). A place that needs another one stays as it is.
        kept_norms: fqns of norms that stay as they are.
        token_alignment: rows that the recipe's GEMMs take are multiples of this; batches are filled up inside.
        feature_alignment: the same of in_features and out_features.
        expert_alignment: the same of each expert's tokens; None: ``token_alignment``.
        whole_mlp: False for recipes with ``backward_override``, which te.LayerNormMLP refuses.
        fp8_eval: whether evaluation runs in FP8 too.

    Raises:
        RuntimeError: the model is fused already; or, by Transformer Engine, there is no CUDA.
        ImportError: Transformer Engine is not installed, or does not import.
    """
    if fused_modules(model):
        raise RuntimeError("The model is fused already; call `unfuse(model)` first to fuse it with other arguments.")
    require("transformer_engine.pytorch", "`fuse='auto'`")
    from lightning_lowprec.te.fusion.units import Options

    options = Options(
        token_alignment=token_alignment, expert_alignment=expert_alignment or token_alignment, fp8_eval=fp8_eval
    )
    limits = rules(model, may_convert, kept_norms, feature_alignment, whole_mlp)
    found = [(site, _row(site, limits)) for site in sites(model)]
    units = {row.fqn: _build(site, row.kind, options) for site, row in found if row.kept is None}
    with unchanged(model):
        for site, row in found:
            if row.kept is None:
                _apply(site, row.kind, units[row.fqn])
    return Fusion(tuple(row for _, row in found))


def unfuse(model: nn.Module) -> None:
    """Undo :func:`fuse`, in place; the scales of the engines are lost. A model that is not fused is left alone."""
    for module in model.modules():
        deferred.revert(module)


def fused_modules(model: nn.Module) -> list[nn.Module]:
    """Every module that fusion gave a role."""
    return [module for module in model.modules() if is_fused(module)]


def engines(model: nn.Module) -> dict[str, Any]:
    """The modules of Transformer Engine that compute, by name: they are in no ``model.modules()``.

    ``"model.layers.0.input_layernorm"`` for a norm and what is behind it, ``"...experts.up"`` and ``"...experts.down"``
    for experts. For their scales (``fp8_meta``), and to set ``is_first_microbatch``.
    """
    found = {}
    for fqn, module in model.named_modules():
        if UNIT in module.__dict__:
            for name, engine in module.__dict__[UNIT].engines().items():
                found[".".join(filter(None, (fqn, name)))] = engine
    return found


def _row(site: Site | ExpertsSite, limits: Rules) -> FusionRow:
    reason = refusal(site, limits)
    if isinstance(site, ExpertsSite):
        names = tuple(f"{site.fqn}.{name}".lstrip(".") for name in ("gate_up_proj", "down_proj"))
        return FusionRow(fqn=site.fqn, kind="grouped experts", linears=names, kept=reason)
    if reason is not None:
        kind: Kind = "norm+linear" if site.mlp is None else "norm+MLP"
        return FusionRow(fqn=site.fqn, kind=kind, linears=(*site.linears, *site.down), kept=reason)
    note = mlp_refusal(site, limits)
    if note is None:
        return FusionRow(fqn=site.fqn, kind="norm+MLP", linears=(*site.linears, *site.down))
    return FusionRow(fqn=site.fqn, kind="norm+linear", linears=tuple(site.linears), note=note or None)


def _build(site: Site | ExpertsSite, kind: Kind, options: Any) -> Any:
    from lightning_lowprec.te.fusion.experts import ExpertsUnit
    from lightning_lowprec.te.fusion.units import FusedUnit

    if isinstance(site, ExpertsSite):
        return ExpertsUnit(site.experts, options)
    linears = list(site.linears.values())
    if kind == "norm+linear" or site.activation is None:
        return FusedUnit(site.norm, linears, options)
    activation = activation_name(site.activation, gated=len(linears) > 1)
    return FusedUnit(site.norm, linears, options, next(iter(site.down.values())), activation)


def _apply(site: Site | ExpertsSite, kind: Kind, unit: Any) -> None:
    from lightning_lowprec.te.fusion.experts import FusedExperts

    if isinstance(site, ExpertsSite):
        deferred.become(site.experts, FusedExperts, unit)
        return
    deferred.become(site.norm, FusedNorm, unit)
    if kind == "norm+MLP" and site.mlp is not None:
        deferred.become(site.mlp, FusedMLP)
    else:
        for linear in site.linears.values():
            deferred.become(linear, FusedLinear)
