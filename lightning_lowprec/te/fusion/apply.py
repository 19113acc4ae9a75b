"""Fuse a model in place, and undo it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from lightning_lowprec.conversion.invariants import unchanged
from lightning_lowprec.te.fusion.candidates import ExpertsCandidate, NormCandidate
from lightning_lowprec.te.fusion.families import activation_name
from lightning_lowprec.te.fusion.modules import (
    UNIT,
    FusedLinear,
    FusedMLP,
    FusedModule,
    FusedNorm,
    fuse_module,
    unfuse_module,
)
from lightning_lowprec.te.fusion.plan import Fusion, Kind, decide
from lightning_lowprec.te.support import pytorch


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

    No Parameter is replaced, so optimizers may exist already.

    Args:
        model: on any device, meta too; before it is sharded or compiled.
        may_convert: fqns of the Linears that may run in FP8, and of the stacked Parameters of experts
            (``"model.layers.0.mlp.experts.gate_up_proj"``). A place that needs any other layer is not fused.
        kept_norms: fqns of norms that are not fused.
        token_alignment: the number of which the rows of the recipe's GEMMs must be multiples; batches are padded.
        feature_alignment: the same number for in_features and out_features.
        expert_alignment: the same number for the tokens of each expert; None: ``token_alignment``.
        whole_mlp: False for recipes with ``backward_override``, which te.LayerNormMLP refuses.
        fp8_eval: whether evaluation runs in FP8 too.

    Raises:
        RuntimeError: the model is fused already, or Transformer Engine found no CUDA.
        ImportError: Transformer Engine is not installed, does not import, or lacks names that this package uses.
    """
    if fused_modules(model):
        raise RuntimeError("The model is fused already; call `unfuse(model)` first to fuse it with other arguments.")
    pytorch("`fuse='auto'`")
    from lightning_lowprec.te.fusion.units import Options

    options = Options(
        token_alignment=token_alignment, expert_alignment=expert_alignment or token_alignment, fp8_eval=fp8_eval
    )
    found = decide(
        model,
        may_convert=may_convert,
        kept_norms=kept_norms,
        feature_alignment=feature_alignment,
        whole_mlp=whole_mlp,
    )
    units = {row.fqn: _build(candidate, row.kind, options) for candidate, row in found if row.kept is None}
    with unchanged(model):
        for candidate, row in found:
            if row.kept is None:
                _apply(candidate, row.kind, units[row.fqn])
    return Fusion(tuple(row for _, row in found))


def unfuse(model: nn.Module) -> None:
    """Undo :func:`fuse`, in place; the scales of the engines are lost. A model that is not fused is left alone."""
    for module in model.modules():
        unfuse_module(module)


def fused_modules(model: nn.Module) -> list[nn.Module]:
    """Return every module whose class fusion has changed."""
    return [module for module in model.modules() if isinstance(module, FusedModule)]


def engines(model: nn.Module) -> dict[str, Any]:
    """Return the modules of Transformer Engine that compute, by name; ``model.modules()`` does not contain them.

    The names are ``"model.layers.0.input_layernorm"`` for a norm with the layers behind it, and ``"...experts.up"`` and
    ``"...experts.down"`` for experts. The engines keep the scales (``fp8_meta``).
    """
    found = {}
    for fqn, module in model.named_modules():
        if UNIT in module.__dict__:
            for name, engine in module.__dict__[UNIT].engines().items():
                found[".".join(filter(None, (fqn, name)))] = engine
    return found


def _build(candidate: NormCandidate | ExpertsCandidate, kind: Kind, options: Any) -> Any:
    from lightning_lowprec.te.fusion.experts import ExpertsUnit
    from lightning_lowprec.te.fusion.units import NormUnit

    if isinstance(candidate, ExpertsCandidate):
        return ExpertsUnit(candidate.experts, options)
    linears = list(candidate.linears.values())
    if kind == "norm+linear" or candidate.activation is None:
        return NormUnit(candidate.norm, linears, options)
    activation = activation_name(candidate.activation, gated=len(linears) > 1)
    return NormUnit(candidate.norm, linears, options, next(iter(candidate.down.values())), activation)


def _apply(candidate: NormCandidate | ExpertsCandidate, kind: Kind, unit: Any) -> None:
    from lightning_lowprec.te.fusion.experts import FusedExperts

    if isinstance(candidate, ExpertsCandidate):
        fuse_module(candidate.experts, FusedExperts, unit)
        return
    fuse_module(candidate.norm, FusedNorm, unit)
    if kind == "norm+MLP" and candidate.mlp is not None:
        fuse_module(candidate.mlp, FusedMLP)
    else:
        for linear in candidate.linears.values():
            fuse_module(linear, FusedLinear)
