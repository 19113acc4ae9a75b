"""Fuse a model in place, and undo it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from lightning_lowprec.conversion.in_place import revert
from lightning_lowprec.conversion.invariants import unchanged
from lightning_lowprec.te.fusion.candidates import ExpertsCandidate, NormCandidate
from lightning_lowprec.te.fusion.modules import UNIT, FusedModule, FusedNorm, FusedReader, fuse_module
from lightning_lowprec.te.fusion.plan import Fusion, FusionRow, Rules, decide
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
    from lightning_lowprec.te.fusion.units import NormUnit, Options

    options = Options(
        token_alignment=token_alignment, expert_alignment=expert_alignment or token_alignment, fp8_eval=fp8_eval
    )
    rules = Rules(
        may_convert=frozenset(may_convert),
        kept_norms=kept_norms,
        feature_alignment=feature_alignment,
        whole_mlp=whole_mlp,
    )
    found = decide(model, rules)
    changes = [change for candidate, row in found if row.kept is None for change in _changes(candidate, row, options)]
    with unchanged(model):
        for module, role, unit in changes:
            fuse_module(module, role, unit)
            if isinstance(unit, NormUnit):
                unit.place_beside()
    return Fusion(tuple(row for _, row in found))


def unfuse(model: nn.Module) -> None:
    """Undo :func:`fuse`, in place; the scales of the engines are lost. A model that is not fused is left alone."""
    for module in fused_modules(model):
        if (place_apart := getattr(module.__dict__.get(UNIT), "place_apart", None)) is not None:
            place_apart()
        revert(module)


def fused_modules(model: nn.Module) -> list[nn.Module]:
    """Return every module whose class fusion has changed."""
    return [module for module in model.modules() if isinstance(module, FusedModule)]


def engines(model: nn.Module) -> dict[str, Any]:
    """Return the modules of Transformer Engine that compute and keep the scales; ``model.modules()`` has none of them.

    The names are ``"model.layers.0.input_layernorm"`` for a norm with the layers behind it, and ``"...experts.up"`` and
    ``"...experts.down"`` for experts.
    """
    units = {fqn: module.__dict__[UNIT] for fqn, module in model.named_modules() if UNIT in module.__dict__}
    return {f"{fqn}{name}".lstrip("."): engine for fqn, unit in units.items() for name, engine in unit.engines.items()}


def _changes(
    candidate: NormCandidate | ExpertsCandidate, row: FusionRow, options: Any
) -> Iterator[tuple[nn.Module, type[FusedModule], Any]]:
    """Yield the modules of a candidate, the classes that they become, and the unit of the module that holds it."""
    from lightning_lowprec.te.fusion.experts import ExpertsUnit, FusedExperts
    from lightning_lowprec.te.fusion.units import NormUnit

    if isinstance(candidate, ExpertsCandidate):
        yield candidate.experts, FusedExperts, ExpertsUnit(candidate.experts, options)
        return
    unit = NormUnit(candidate, options, whole_mlp=row.kind == "norm+MLP")
    yield candidate.norm, FusedNorm, unit
    for reader in unit.readers:
        yield reader, FusedReader, None
