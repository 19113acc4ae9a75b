"""Find the places of a model that may be fused, by structure alone: names and classes.

:mod:`~lightning_lowprec.te.fusion.plan` decides which of the candidates are fused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from lightning_lowprec.te.fusion.families import FAMILIES, Family, Pair


@dataclass(frozen=True, kw_only=True)
class NormCandidate:
    """A norm, the linear layers behind it, and the modules between."""

    fqn: str
    """Of the norm."""
    norm: nn.Module
    linears: dict[str, Any]
    """By fqn: the linear layers that read the norm's output."""
    between: tuple[nn.Module, ...]
    """The modules that get the norm's output and pass it to the linear layers: attention or MLP."""
    mlp: nn.Module | None = None
    down: dict[str, Any]
    """By fqn: the second linear layer of ``mlp``; empty if there is none."""
    activation: nn.Module | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertsCandidate:
    """The experts of a mixture, stacked in two Parameters."""

    fqn: str
    experts: nn.Module


def candidates(model: nn.Module) -> Iterator[NormCandidate | ExpertsCandidate]:
    """Yield all candidates, in the order of ``named_modules``."""
    for fqn, module in model.named_modules():
        family = next((family for family in FAMILIES if _is(module, family.module, family.layer)), None)
        if family is not None:
            yield from _in_layer(fqn, module, family)
        elif type(module) is nn.Sequential:
            yield from _in_sequential(fqn, module)
        elif _is_stack_of_experts(module):
            yield ExpertsCandidate(fqn=fqn, experts=module)


def _is(module: nn.Module, package: str, name: str) -> bool:
    """Return whether the module is exactly of this class, whose package must be imported if an object exists."""
    cls = type(module)
    return cls.__module__ == package and cls is getattr(sys.modules.get(package), name, None)


def _in_layer(fqn: str, layer: nn.Module, family: Family) -> Iterator[NormCandidate]:
    for pair in family.pairs:
        norm, inside = layer._modules.get(pair.norm), layer._modules.get(pair.inside)
        expected = (family.module, family.norm) if family.norm else ("torch.nn.modules.normalization", "LayerNorm")
        if norm is not None and inside is not None and _is(norm, *expected) and _is(inside, family.module, pair.cls):
            yield _candidate(fqn, norm, inside, pair)


def _candidate(fqn: str, norm: nn.Module, inside: nn.Module, pair: Pair) -> NormCandidate:
    prefix = _join(fqn, pair.inside)
    down = {} if pair.down is None else {_join(prefix, pair.down): inside._modules[pair.down]}
    return NormCandidate(
        fqn=_join(fqn, pair.norm),
        norm=norm,
        linears={_join(prefix, name): inside._modules[name] for name in pair.linears},
        between=(inside,),
        mlp=inside if down else None,
        down=down,
        activation=None if pair.activation is None else inside._modules[pair.activation],
    )


def _in_sequential(fqn: str, sequential: nn.Sequential) -> Iterator[NormCandidate]:
    for (name, norm), (behind, linear) in pairwise(sequential._modules.items()):
        if type(norm) in (nn.LayerNorm, nn.RMSNorm) and type(linear) is nn.Linear:
            linears = {_join(fqn, behind): linear}
            yield NormCandidate(fqn=_join(fqn, name), norm=norm, linears=linears, between=(), down={})


def _is_stack_of_experts(module: nn.Module) -> bool:
    """Return whether transformers would run the module as grouped GEMMs (its ``use_experts_implementation``)."""
    described = {"has_gate", "has_bias", "is_transposed", "is_concatenated"} <= module.__dict__.keys()
    of_transformers = type(module).__module__.startswith("transformers.")
    return described and of_transformers and {"gate_up_proj", "down_proj"} <= module._parameters.keys()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
