"""The FLOPs and bytes of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from lightning_lowprec import names
from lightning_lowprec.conversion.gemms import ALL_GEMMS, NO_GEMM, InBF16
from lightning_lowprec.conversion.matmuls import CONV1D
from lightning_lowprec.conversion.name_formats import LIGHTNINGS, Formats
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.conversion.plan_row import PlanRow

SEQUENCE_LENGTH = 4096
COMPARED = (
    "32-true",
    "bf16-true",
    "bf16-lean-sr",
    "bf16-lean",
    "bf16-sr",
    "bf16-remainder",
    "bf16-master",
    "bf16-mixed",
)
"""Names that convert no layers, beside which a plan is shown."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Matrix FLOPs of one training step, per token: forward 2, backward 4 per weight that trains.

    Args:
        fp8: in FP8.
        high_precision: in linear layers that are kept, recurrent layers and ``nn.MultiheadAttention.in_proj``.
        attention: the scores and their sum over values, causal; 0 if the model's attention is not known.
    """

    fp8: float
    high_precision: float
    attention: float

    @property
    def fp8_share(self) -> float:
        """The share of all matrix FLOPs that runs in FP8."""
        total = self.fp8 + self.high_precision + self.attention
        return self.fp8 / total if total else 0.0


def flops(plan: Plan, *, attention_width: int = 0, sequence_length: int = SEQUENCE_LENGTH) -> Flops:
    """Return the FLOPs of a plan.

    Args:
        plan: the plan.
        attention_width: heads x head_dim x layers.
        sequence_length: tokens per sequence; a causal token attends to half of them on average.
    """
    total = sum(_of(row) for row in plan.all_rows)
    fp8 = sum(_of(row, _in_bf16(plan, row)) for row in plan.rows if row.kept_because is None)
    # scores and values: 2 products of 2 FLOPs, half the positions, three times with backward
    attention = 6.0 * sequence_length * attention_width
    return Flops(fp8=fp8, high_precision=total - fp8, attention=attention)


def _in_bf16(plan: Plan, row: PlanRow) -> InBF16:
    own = plan.recipes.get(row.fqn)
    return NO_GEMM if own is None else own.in_bf16


def _of(row: PlanRow, without: InBF16 = NO_GEMM) -> float:
    gemms = len(ALL_GEMMS - without - (NO_GEMM if row.trains else {"grad_weight"}))
    return 2.0 * gemms * row.per_token * row.in_features * row.out_features


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of a model under one precision with AdamW, before any sharding.

    Args:
        precision: the name.
        weights: of all weights.
        gradients: of all gradients.
        optimizer: AdamW's two moments, and masters where the precision has some.
        gathered: all weights once, in the dtype in which ``strategy="fsdp2"`` gathers them; 0 where it does not run.
    """

    precision: str
    weights: int
    gradients: int
    optimizer: int
    gathered: int

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer together."""
        return self.weights + self.gradients + self.optimizer


def footprints(
    model: nn.Module,
    plan: Plan,
    precision: str,
    *,
    fp8_all_gather: bool | Mapping[str, bool] = True,
) -> list[Bytes]:
    """Return the bytes under precisions that convert no layers, and under ``precision`` with this plan.

    Args:
        model: the model of the plan.
        plan: the layers that convert.
        precision: the name of the last row.
        fp8_all_gather: whether converted weights can be gathered as float8 (tensorwise recipes can); of weights that
            are kept as codes, whether they run under FSDP2. With recipes per layer: the answer for each recipe.
    """
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rows = [_bytes(name, _formats(name), total, trained) for name in COMPARED]
    mixed, formats = rows[-1], _formats(precision)
    converted = [row for row in plan.rows if row.kept_because is None]
    coded = sum(row.elements for row in gathered_rows(plan, precision, fp8_all_gather))
    gathered = mixed.gathered - coded
    if not formats.keeps_codes:
        return [*rows, replace(_bytes(precision, formats, total, trained), gathered=gathered)]
    inside = sum(row.elements for row in converted), sum(row.elements for row in converted if row.trains)
    of_codes, others = _bytes("", formats, *inside), _bytes("", _formats(mixed.precision), *inside)
    last = Bytes(
        precision=precision,
        weights=mixed.weights - others.weights + of_codes.weights,
        gradients=mixed.gradients - others.gradients + of_codes.gradients,
        optimizer=mixed.optimizer - others.optimizer + of_codes.optimizer,
        gathered=gathered if fp8_all_gather else 0,
    )
    return [*rows, last]


def _formats(precision: str) -> Formats:
    """Return the formats of a name; those of ``bf16-mixed`` if nobody has said them."""
    row = names.TABLE.get(precision)
    found = LIGHTNINGS.get(precision) if row is None else row.formats
    return found or LIGHTNINGS["bf16-mixed"]


def _bytes(precision: str, formats: Formats, total: int, trained: int) -> Bytes:
    weight, gradient, kept, sent = formats.bytes_per_parameter
    return Bytes(
        precision=precision,
        weights=weight * total,
        gradients=gradient * trained,
        optimizer=kept * trained,
        gathered=sent * total,
    )


def gathered_rows(plan: Plan, precision: str, fp8_all_gather: bool | Mapping[str, bool] = True) -> list[PlanRow]:
    """Return the rows whose weights FSDP2 gathers as float8; the arguments are those of :func:`footprints`."""
    name = names.TABLE.get(precision)
    every = name is None or name.conv1d == "gathered"

    def as_codes(row: PlanRow) -> bool:
        if row.kept_because is not None or not (every or row.kind != CONV1D):
            return False
        if not isinstance(fp8_all_gather, Mapping):
            return fp8_all_gather
        own = plan.recipes[row.fqn]
        return fp8_all_gather[own.name or ""] and own.in_bf16 <= {"grad_weight"}

    return [row for row in plan.rows if as_codes(row)]
