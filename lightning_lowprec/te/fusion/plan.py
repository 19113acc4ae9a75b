"""Decide which candidates of a model are fused, and give the reason for all others; no weight is touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_lowprec.te.fusion.candidates import ExpertsCandidate, NormCandidate, candidates
from lightning_lowprec.te.fusion.families import activation_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Kind = Literal["norm+linear", "norm+MLP", "grouped experts"]


@dataclass(frozen=True, kw_only=True)
class FusionRow:
    """The decision about one candidate."""

    fqn: str
    """Of the norm, or of the experts."""
    kind: Kind
    linears: tuple[str, ...]
    """Fqns of the Linears (of experts: of the Parameters) that the single call computes."""
    kept: str | None = None
    """The reason why the candidate is not fused; None if it is fused."""
    note: str | None = None
    """The reason why a norm is fused with linear layers only, not with the whole MLP."""


@dataclass(frozen=True)
class Fusion:
    """The decisions about all candidates of a model."""

    rows: tuple[FusionRow, ...]

    @property
    def fused(self) -> tuple[FusionRow, ...]:
        """The rows of the candidates that are fused."""
        return tuple(row for row in self.rows if row.kept is None)

    @property
    def handled(self) -> frozenset[str]:
        """Fqns of all norms, Linears and experts' Parameters that fused calls compute."""
        return frozenset(fqn for row in self.fused for fqn in (row.fqn, *row.linears))

    def summary(self) -> str:
        """Return one line: ``fused 64 of 65 places (32 norm+linear, 32 norm+MLP); kept 1: ... ('model.layers...')``."""
        if not self.rows:
            return "fused nothing: no structure that fusion knows"
        kinds = Counter(row.kind for row in self.fused)
        text = f"fused {len(self.fused)} of {len(self.rows)} places"
        if kinds:
            text += f" ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})"
        remarks = [(f"kept {{}}: {row.kept}", row.fqn) for row in self.rows if row.kept is not None]
        remarks += [(f"{{}} without the MLP: {row.note}", row.fqn) for row in self.fused if row.note]
        for remark, count in Counter(remark for remark, _ in remarks).items():
            fqn = next(fqn for other, fqn in remarks if other == remark)
            text += f"; {remark.format(count)} ({fqn!r}{f' and {count - 1} more' if count > 1 else ''})"
        return text


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The conditions under which candidates are fused."""

    may_convert: frozenset[str]
    """Fqns of the Linears, and of the stacked Parameters of experts, that may run in FP8."""
    kept_norms: frozenset[str]
    feature_alignment: int
    """The number of which the features of the recipe's GEMMs must be multiples."""
    whole_mlp: bool
    """Whether the recipe runs a norm and an MLP as one (it does not with ``backward_override``)."""
    shared: frozenset[int]
    """The ids of the modules and Parameters that the model uses in several places."""


def decide(
    model: nn.Module,
    *,
    may_convert: Collection[str],
    kept_norms: Collection[str] = (),
    feature_alignment: int = 16,
    whole_mlp: bool = True,
) -> list[tuple[NormCandidate | ExpertsCandidate, FusionRow]]:
    """Decide about all candidates; the arguments are those of :func:`~lightning_lowprec.te.fusion.fuse`."""
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    places += Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    rules = Rules(
        may_convert=frozenset(may_convert),
        kept_norms=frozenset(kept_norms),
        feature_alignment=feature_alignment,
        whole_mlp=whole_mlp,
        shared=frozenset(key for key, count in places.items() if count > 1),
    )
    return [(candidate, _row(candidate, rules)) for candidate in candidates(model)]


def plan_fusion(model: nn.Module, **limits: Any) -> Fusion:
    """Return the result that :func:`~lightning_lowprec.te.fusion.fuse` would have, and leave the model unchanged.

    This needs no Transformer Engine, and a model on meta will do. The arguments are those of :func:`decide`.
    """
    return Fusion(tuple(row for _, row in decide(model, **limits)))


def _row(candidate: NormCandidate | ExpertsCandidate, rules: Rules) -> FusionRow:
    reason = _refusal(candidate, rules)
    if isinstance(candidate, ExpertsCandidate):
        names = tuple(f"{candidate.fqn}.{name}".lstrip(".") for name in ("gate_up_proj", "down_proj"))
        return FusionRow(fqn=candidate.fqn, kind="grouped experts", linears=names, kept=reason)
    note = _mlp_refusal(candidate, rules) if reason is None else None
    if candidate.mlp is None or candidate.activation is None or note is not None:
        return FusionRow(
            fqn=candidate.fqn, kind="norm+linear", linears=tuple(candidate.linears), kept=reason, note=note
        )
    linears = (*candidate.linears, *candidate.down)
    return FusionRow(fqn=candidate.fqn, kind="norm+MLP", linears=linears, kept=reason)


def _refusal(candidate: NormCandidate | ExpertsCandidate, rules: Rules) -> str | None:
    """Return the reason why nothing is fused; None: a norm is fused at least with the linear layers behind it."""
    if isinstance(candidate, ExpertsCandidate):
        return next(_experts(candidate, rules), None)
    linears = list(candidate.linears.values())
    bypassed = _bypassed([candidate.norm, *linears, *candidate.between])
    return next(chain(_linears(candidate.linears, candidate.norm, rules), _norm(candidate, rules), bypassed), None)


def _mlp_refusal(candidate: NormCandidate, rules: Rules) -> str | None:
    """Return the reason why a norm is fused without the whole MLP, or None; also None if there is no MLP."""
    if candidate.mlp is None or candidate.activation is None:
        return None
    first, (fqn, down) = next(iter(candidate.linears.values())), next(iter(candidate.down.items()))
    if not rules.whole_mlp:
        return "the recipe's backward is not that of LayerNormMLP"
    if activation_name(candidate.activation, gated=len(candidate.linears) > 1) is None:
        return f"Transformer Engine has no activation equal to {type(candidate.activation).__name__}"
    reason = next(chain(_bypassed([down, candidate.activation]), _linears({fqn: down}, candidate.norm, rules)), None)
    if reason is None and (down.bias is None) != (first.bias is None):
        return "its linear layers have biases here and none there"
    return reason


def _bypassed(modules: list[nn.Module]) -> Iterator[str]:
    """Yield the hooks and replaced forwards that would not run any more, or would see another tensor."""
    for module in modules:
        name = type(module).__name__
        if any(value for key, value in vars(module).items() if key.endswith("_hooks") and "state_dict" not in key):
            yield f"hooks on its {name} would see no normalised tensor"
        if "forward" in vars(module) or module._compiled_call_impl is not None:
            yield f"the forward of its {name} is replaced on the instance"


def _norm(candidate: NormCandidate, rules: Rules) -> Iterator[str]:
    norm, kind = cast(Any, candidate.norm), type(candidate.norm)
    width = next(iter(candidate.linears.values())).in_features
    if candidate.fqn in rules.kept_norms:
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


def _experts(candidate: ExpertsCandidate, rules: Rules) -> Iterator[str]:
    experts: Any = candidate.experts
    names = ("gate_up_proj", "down_proj")
    kept = [name for name in names if f"{candidate.fqn}.{name}".lstrip(".") not in rules.may_convert]
    if kept:
        yield f"{kept[0]} is kept in high precision"
    if not experts.has_gate or experts.has_bias or experts.is_transposed:
        yield "its experts are ungated, have biases, or are stored transposed"
    yield from _bypassed([experts])
    if any(size % rules.feature_alignment for name in names for size in getattr(experts, name).shape[1:]):
        yield f"features are no multiples of {rules.feature_alignment}"
    yield from _parameters([experts.gate_up_proj, experts.down_proj], rules)
