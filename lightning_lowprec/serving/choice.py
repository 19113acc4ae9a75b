"""Which weights of a model become codes, and why the others stay in high precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from torch import nn

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.matmuls import STACKED, matmuls
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.numerics.weight_rounding import WeightRounding
from lightning_lowprec.serving.adapters import is_of_adapter, model_name


@final
@dataclass(frozen=True, kw_only=True)
class Choice:
    """The weights that ran in FP8."""

    roundings: Mapping[str, WeightRounding | None]
    """By name of the tensor; None: the forward's scales have no place in any format, or there was no such forward."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """The names of the other linear layers, and the reasons."""


def of_layers(model: nn.Module) -> Choice:
    """Return the choice of a live model: the weights that its converted layers multiply, or multiplied, in FP8."""
    roundings: dict[str, WeightRounding | None] = {}
    kept: dict[str, str] = {}
    for matmul, module in matmuls(model):
        fqn = model_name(matmul.fqn)
        if is_of_adapter(fqn):
            continue
        path, _, parameter = (fqn if matmul.kind == STACKED else _join(fqn, "weight")).rpartition(".")
        found = backends.weight_roundings(module)
        if found is None:
            kept[fqn] = "not converted"
        elif parameter in found:
            roundings[_join(path, parameter)] = found[parameter]
        else:
            kept[fqn] = "the forward of its layer has no codes of a scale per weight, row or block"
    return Choice(roundings=roundings, kept=kept)


def of_names(model: nn.Module) -> Choice:
    """Return the choice of a live model whose forward has no codes that a format takes: its converted layers."""
    found = [(model_name(matmul.fqn), matmul.kind) for matmul, module in matmuls(model) if backends.owner(module)]
    names = (fqn if kind == STACKED else _join(fqn, "weight") for fqn, kind in found if not is_of_adapter(fqn))
    return Choice(roundings=dict.fromkeys(names))


def of_plan(plan: Plan, rounding: WeightRounding | None) -> Choice:
    """Return the choice of a plan, whose weights are rounded one way."""
    roundings = {
        row.fqn if row.kind == STACKED else _join(row.fqn, "weight"): rounding
        for row in plan.rows
        if row.kept_because is None
    }
    kept = {row.fqn: row.kept_because for row in plan.rows if row.kept_because is not None}
    return Choice(roundings=roundings, kept=kept)


NOTHING = Choice(roundings={})
"""For formats without codes."""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
