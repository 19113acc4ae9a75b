"""Choose the weights of a model that become codes, and say why the others stay in high precision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final

from torch import nn

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.matmuls import STACKED, matmuls
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.numerics.weight_rounding import WeightRounding
from lightning_lowprec.serving.sources import is_of_adapter, model_name

WITHOUT_FP8: Final = "fp8-rowwise"
"""The precision whose plan says which layers become codes, where the run had no FP8."""


@final
@dataclass(frozen=True, kw_only=True)
class RoundedWeights:
    """The weights that ran in FP8."""

    roundings: Mapping[str, WeightRounding | None]
    """By name of the tensor; None: the forward's scales have no place in any format, or there was no such forward."""
    kept: Mapping[str, str] = field(default_factory=dict)


NOTHING: Final = RoundedWeights(roundings={})


def of_layers(model: nn.Module) -> RoundedWeights:
    """Choose the weights of a live model that its converted layers multiply, or multiplied, in FP8."""
    roundings: dict[str, WeightRounding | None] = {}
    kept: dict[str, str] = {}
    for matmul, module in matmuls(model):
        fqn = model_name(matmul.fqn)
        if is_of_adapter(fqn):
            continue
        name = weight_name(fqn, matmul.kind)
        parameter = name.rpartition(".")[2]
        of_layer = backends.weight_roundings(module)
        if of_layer is None:
            kept[fqn] = "not converted"
        elif parameter in of_layer:
            roundings[name] = of_layer[parameter]
        else:
            kept[fqn] = "the forward of its layer has no codes of a scale per weight, row or block"
    return RoundedWeights(roundings=roundings, kept=kept)


def of_plan(plan: Plan, rounding: WeightRounding | None) -> RoundedWeights:
    """Choose the weights that a plan converts; they are rounded one way."""
    rows = [(model_name(row.fqn), row) for row in plan.rows]
    roundings = {weight_name(fqn, row.kind): rounding for fqn, row in rows if row.kept_because is None}
    return RoundedWeights(
        roundings=roundings, kept={fqn: row.kept_because for fqn, row in rows if row.kept_because is not None}
    )


def weight_name(fqn: str, kind: str) -> str:
    """Return the name of a layer's weight; stacked experts are listed by their Parameters."""
    return fqn if kind == STACKED else f"{fqn}.weight".lstrip(".")
