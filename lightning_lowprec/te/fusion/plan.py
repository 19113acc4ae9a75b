"""Decide which candidates of a model are fused, and give the reason for all others; no weight is touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_lowprec.private.torch_modules import is_compiled
from lightning_lowprec.te.fusion.candidates import ExpertsCandidate, NormCandidate, activation_name, candidates

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
    """The conditions under which candidates are fused; see :func:`~lightning_lowprec.te.fusion.fuse`."""

    may_convert: Collection[str]
    kept_norms: Collection[str] = ()
    feature_alignment: int = 16
    whole_mlp: bool = True
    shared: frozenset[int] = frozenset()
    """The ids of the modules and Parameters that the model uses in several places."""


def decide(model: nn.Module, rules: Rules) -> list[tuple[NormCandidate | ExpertsCandidate, FusionRow]]:
    """Decide about all candidates."""
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    uses += Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    rules = replace(rules, shared=frozenset(key for key, count in uses.items() if count > 1))
    return [(candidate, _row(candidate, rules)) for candidate in candidates(model)]


def plan_fusion(model: nn.Module, **limits: Any) -> Fusion:
    """Return the result that :func:`~lightning_lowprec.te.fusion.fuse` would have, and leave the model unchanged.

    This needs no Transformer Engine, and a model on meta will do. ``limits`` are the fields of :class:`Rules`.
    """
    return Fusion(tuple(row for _, row in decide(model, Rules(**limits))))


def _row(candidate: NormCandidate | ExpertsCandidate, rules: Rules) -> FusionRow:
    if isinstance(candidate, ExpertsCandidate):
        prefix = f"{candidate.fqn}." if candidate.fqn else ""
        names = (f"{prefix}gate_up_proj", f"{prefix}down_proj")
        kept = next(_of_experts(candidate.experts, names, rules), None)
        return FusionRow(fqn=candidate.fqn, kind="grouped experts", linears=names, kept=kept)
    kept = next(_of_norm(candidate, rules), None)
    note = next(_of_mlp(candidate, rules), None) if candidate.down and kept is None else None
    if note is not None or not candidate.down:
        linears = tuple(candidate.linears)
        return FusionRow(fqn=candidate.fqn, kind="norm+linear", linears=linears, kept=kept, note=note)
    return FusionRow(fqn=candidate.fqn, kind="norm+MLP", linears=(*candidate.linears, *candidate.down), kept=kept)


# Each of these functions yields the reasons why something is not fused.


def _of_norm(candidate: NormCandidate, rules: Rules) -> Iterator[str]:
    """Reasons that concern the norm and the linear layers behind it."""
    norm, kind = candidate.norm, type(candidate.norm)
    linears = list(candidate.linears.values())
    yield from _of_linears(candidate.linears, norm, rules)
    if candidate.fqn in rules.kept_norms:
        yield "its norm is kept as it is"
    if norm._parameters.get("weight") is None:
        yield "a norm without weight"
    elif tuple(norm.weight.shape) != (linears[0].in_features,):
        yield "the norm is over more than the features"
    elif kind is nn.LayerNorm and norm.bias is None:
        yield "a LayerNorm without bias"
    elif kind is nn.RMSNorm and norm.eps is None:
        yield "an RMSNorm whose eps depends on the dtype"
    yield from _of_calls(norm, *linears, candidate.inside)


def _of_mlp(candidate: NormCandidate, rules: Rules) -> Iterator[str]:
    """Reasons that concern the whole MLP behind the norm."""
    first, down = next(iter(candidate.linears.values())), next(iter(candidate.down.values()))
    if not rules.whole_mlp:
        yield "the recipe's backward is not that of LayerNormMLP"
    if activation_name(candidate.activation, gated=len(candidate.linears) > 1) is None:
        yield f"Transformer Engine has no activation equal to {type(candidate.activation).__name__}"
    yield from _of_calls(down, candidate.activation)
    yield from _of_linears(candidate.down, candidate.norm, rules)
    if (down.bias is None) != (first.bias is None):
        yield "its linear layers have biases here and none there"


def _of_calls(*modules: nn.Module | None) -> Iterator[str]:
    """Reasons of modules whose hooks or replaced forward would not run any more, or would see another tensor."""
    for module in filter(None, modules):
        name = type(module).__name__
        if any(value for key, value in vars(module).items() if key.endswith("_hooks") and "state_dict" not in key):
            yield f"hooks on its {name} would see no normalised tensor"
        if "forward" in vars(module) or is_compiled(module):
            yield f"the forward of its {name} is replaced on the instance"


def _of_linears(linears: dict[str, Any], norm: nn.Module, rules: Rules) -> Iterator[str]:
    for fqn, linear in linears.items():
        name = fqn.rpartition(".")[2]
        if fqn not in rules.may_convert:
            yield f"{name} is kept in high precision"
        elif type(linear) is not nn.Linear:
            yield f"{name} is no plain Linear ({type(linear).__name__})"
        elif linear.in_features % rules.feature_alignment or linear.out_features % rules.feature_alignment:
            yield f"features of {name} are no multiples of {rules.feature_alignment}"
        else:
            yield from _of_parameters([*linear.parameters(), *norm.parameters()], rules)
    if len({linear.bias is None for linear in linears.values()}) > 1:
        yield "some of its linear layers have a bias"


def _of_parameters(parameters: list[nn.Parameter], rules: Rules) -> Iterator[str]:
    if len({(p.dtype, p.device) for p in parameters}) > 1 or parameters[0].dtype not in DTYPES:
        yield "its weights have several dtypes or devices, or one that is not fp32, bf16 or fp16"
    if any(id(p) in rules.shared for p in parameters):
        yield "its weights are used in several places"
    if any(isinstance(p, DTensor) for p in parameters):
        yield "its weights are sharded already"


def _of_experts(experts: Any, names: tuple[str, str], rules: Rules) -> Iterator[str]:
    for name in names:
        if name not in rules.may_convert:
            yield f"{name.rpartition('.')[2]} is kept in high precision"
    if not experts.has_gate or experts.has_bias or experts.is_transposed:
        yield "its experts are ungated, have biases, or are stored transposed"
    yield from _of_calls(experts)
    parameters = [experts.gate_up_proj, experts.down_proj]
    if any(size % rules.feature_alignment for parameter in parameters for size in parameter.shape[1:]):
        yield f"features are no multiples of {rules.feature_alignment}"
    yield from _of_parameters(parameters, rules)
