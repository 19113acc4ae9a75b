"""Every place of a model where fusion might be: found by structure, judged elsewhere. Reads names and classes only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from lightning_lowprec.te.fusion.families import FAMILIES, Family, Pair


@dataclass(frozen=True, kw_only=True)
class Site:
    """A norm, the linear layers behind it, and what is between."""

    fqn: str
    """The norm's."""
    norm: nn.Module
    linears: dict[str, Any]
    """By fqn: those that read the norm's output."""
    between: tuple[nn.Module, ...]
    """Modules that are given the norm's output on the way: attention or MLP."""
    mlp: nn.Module | None = None
    down: dict[str, Any]
    """By fqn: the second linear layer of ``mlp``, or nothing."""
    activation: nn.Module | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertsSite:
    """Stacked experts."""

    fqn: str
    experts: nn.Module


def sites(model: nn.Module) -> Iterator[Site | ExpertsSite]:
    """All of them, in the order of ``named_modules``."""
    for fqn, module in model.named_modules():
        family = next((family for family in FAMILIES if _is(module, family.module, family.layer)), None)
        if family is not None:
            yield from _of_layer(fqn, module, family)
        elif type(module) is nn.Sequential:
            yield from _of_sequential(fqn, module)
        elif _is_stack_of_experts(module):
            yield ExpertsSite(fqn=fqn, experts=module)


def _is(module: nn.Module, package: str, name: str) -> bool:
    """Whether it is exactly this class. Its module is imported already, or nothing could be of the class."""
    cls = type(module)
    return cls.__module__ == package and cls is getattr(sys.modules.get(package), name, None)


def _of_layer(fqn: str, layer: nn.Module, family: Family) -> Iterator[Site]:
    for pair in family.pairs:
        norm, inside = layer._modules.get(pair.norm), layer._modules.get(pair.inside)
        expected = (family.module, family.norm) if family.norm else ("torch.nn.modules.normalization", "LayerNorm")
        if norm is not None and inside is not None and _is(norm, *expected) and _is(inside, family.module, pair.cls):
            yield _site(fqn, norm, inside, pair)


def _site(fqn: str, norm: nn.Module, inside: nn.Module, pair: Pair) -> Site:
    prefix = _join(fqn, pair.inside)
    down = {} if pair.down is None else {_join(prefix, pair.down): inside._modules[pair.down]}
    return Site(
        fqn=_join(fqn, pair.norm),
        norm=norm,
        linears={_join(prefix, name): inside._modules[name] for name in pair.linears},
        between=(inside,),
        mlp=inside if down else None,
        down=down,
        activation=None if pair.activation is None else inside._modules[pair.activation],
    )


def _of_sequential(fqn: str, sequential: nn.Sequential) -> Iterator[Site]:
    for (name, norm), (behind, linear) in pairwise(sequential._modules.items()):
        if type(norm) in (nn.LayerNorm, nn.RMSNorm) and type(linear) is nn.Linear:
            linears = {_join(fqn, behind): linear}
            yield Site(fqn=_join(fqn, name), norm=norm, linears=linears, between=(), down={})


def _is_stack_of_experts(module: nn.Module) -> bool:
    """Whether transformers itself would run it as grouped GEMMs (its decorator ``use_experts_implementation``)."""
    described = {"has_gate", "has_bias", "is_transposed", "is_concatenated"} <= module.__dict__.keys()
    ours = type(module).__module__.startswith("transformers.")
    return described and ours and {"gate_up_proj", "down_proj"} <= module._parameters.keys()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
