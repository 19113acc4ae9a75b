"""Which weights become codes of a model that did not train in FP8: the plan that FP8 training would make."""

from __future__ import annotations

from typing import Final

from torch import nn

from lightning_lowprec import names
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.plan import Plan, make_plan

WITHOUT_FP8: Final = "fp8-rowwise"
"""The precision whose plan says which layers become codes, where the run had no FP8."""


def plan_without_fp8(model: nn.Module, options: LayerOptions | None = None) -> Plan:
    """Return the plan of ``fp8-rowwise`` for a model that no precision has converted."""
    row = names.resolve(WITHOUT_FP8)
    return make_plan(
        model,
        options,
        recipe=row.gains,
        alignment=row.alignment,
        conv1d=row.conv1d != "kept",
        experts=row.experts,
    )
