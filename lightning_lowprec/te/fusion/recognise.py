"""Which of a model's sites are fused, and why the others are not. Touches no weight; a meta model will do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_lowprec.te.fusion.families import activation_name
from lightning_lowprec.te.fusion.sites import ExpertsSite, Site

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What may be fused."""

    may_convert: frozenset[str]
    """Fqns of the Linears, and of the stacked Parameters of experts, that may run in FP8."""
    kept_norms: frozenset[str]
    feature_alignment: int
    """Features that the recipe's GEMMs take are multiples of this."""
    whole_mlp: bool
    """Whether the recipe runs a norm and an MLP as one (it does not with ``backward_override``)."""
    shared: frozenset[int]
    """The ids of modules and Parameters that the model has in several places."""


def rules(
    model: nn.Module,
    may_convert: Collection[str],
    kept_norms: Collection[str],
    feature_alignment: int,
    whole_mlp: bool,
) -> Rules:
    """The rules for one model."""
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    places += Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return Rules(
        may_convert=frozenset(may_convert),
        kept_norms=frozenset(kept_norms),
        feature_alignment=feature_alignment,
        whole_mlp=whole_mlp,
        shared=frozenset(one for one, count in places.items() if count > 1),
    )


def refusal(site: Site | ExpertsSite, rules: Rules) -> str | None:
    """Why nothing is fused here, or None: then at least the norm and the linear layers behind it are."""
    if isinstance(site, ExpertsSite):
        return next(_experts(site, rules), None)
    linears = list(site.linears.values())
    touched = _touched([site.norm, *linears, *site.between])
    return next(chain(_linears(site.linears, site.norm, rules), _norm(site, rules), touched), None)


def mlp_refusal(site: Site, rules: Rules) -> str | None:
    """Why a norm is fused with its linear layers only and not with the whole MLP, or None; "" if there is no MLP."""
    if site.mlp is None or site.activation is None:
        return ""
    first, (fqn, down) = next(iter(site.linears.values())), next(iter(site.down.items()))
    if not rules.whole_mlp:
        return "the recipe's backward is not that of LayerNormMLP"
    if activation_name(site.activation, gated=len(site.linears) > 1) is None:
        return f"Transformer Engine has no activation equal to {type(site.activation).__name__}"
    reason = next(chain(_touched([down, site.activation]), _linears({fqn: down}, site.norm, rules)), None)
    if reason is None and (down.bias is None) != (first.bias is None):
        return "its linear layers have biases here and none there"
    return reason


def _touched(modules: list[nn.Module]) -> Iterator[str]:
    """What would not run any more, or see something else."""
    for module in modules:
        name = type(module).__name__
        if any(value for key, value in vars(module).items() if key.endswith("_hooks") and "state_dict" not in key):
            yield f"hooks on its {name} would see no normalised tensor"
        if "forward" in vars(module) or module._compiled_call_impl is not None:
            yield f"the forward of its {name} is replaced on the instance"


def _norm(site: Site, rules: Rules) -> Iterator[str]:
    norm, kind = cast(Any, site.norm), type(site.norm)
    width = next(iter(site.linears.values())).in_features
    if site.fqn in rules.kept_norms:
        yield "its norm is kept as it is"
    if norm._parameters.get("weight") is None:
        yield "a norm without weight"
    elif tuple(norm.weight.shape) != (width,):
        yield "the norm is over more than the features"
    elif kind is nn.LayerNorm and norm.bias is None:
        yield "a LayerNorm without bias"
    elif kind is nn.RMSNorm and norm.eps is None:
        yield "an RMSNorm whose eps depends on the dtype"


def _linears(linears: dict[str, Any], norm: Any, rules: Rules) -> Iterator[str]:
    for fqn, linear in linears.items():
        name = fqn.rpartition(".")[2]
        if fqn not in rules.may_convert:
            yield f"{name} is kept in high precision"
        elif type(linear) is not nn.Linear:
            yield f"{name} is no plain Linear ({type(linear).__name__})"
        elif linear.in_features % rules.feature_alignment or linear.out_features % rules.feature_alignment:
            yield f"features of {name} are no multiples of {rules.feature_alignment}"
        else:
            yield from _parameters([*linear.parameters(), *norm.parameters()], rules)
    if len({linear.bias is None for linear in linears.values() if type(linear) is nn.Linear}) > 1:
        yield "some of its linear layers have a bias"


def _parameters(parameters: list[nn.Parameter], rules: Rules) -> Iterator[str]:
    if len({(p.dtype, p.device) for p in parameters}) > 1 or parameters[0].dtype not in DTYPES:
        yield "its weights have several dtypes or devices, or one that is not fp32, bf16 or fp16"
    if any(id(p) in rules.shared for p in parameters):
        yield "its weights are used in several places"
    if any(isinstance(p, DTensor) for p in parameters):
        yield "its weights are sharded already"


def _experts(site: ExpertsSite, rules: Rules) -> Iterator[str]:
    experts: Any = site.experts
    names = ("gate_up_proj", "down_proj")
    kept = [name for name in names if f"{site.fqn}.{name}".lstrip(".") not in rules.may_convert]
    if kept:
        yield f"{kept[0]} is kept in high precision"
    if not experts.has_gate or experts.has_bias or experts.is_transposed:
        yield "its experts are ungated, have biases, or are stored transposed"
    yield from _touched([experts])
    if any(size % rules.feature_alignment for name in names for size in getattr(experts, name).shape[1:]):
        yield f"features are no multiples of {rules.feature_alignment}"
    yield from _parameters([experts.gate_up_proj, experts.down_proj], rules)
