"""The FLOPs and bytes of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_lowprec.conversion.plan import Plan, PlanRow
from lightning_lowprec.tools.planning.volume import Weights, gathered

SEQUENCE_LENGTH = 4096
LAYOUT: Mapping[str, tuple[int, torch.dtype]] = {
    "32-true": (4, torch.float32),
    "bf16-true": (2, torch.bfloat16),
    "bf16-mixed": (4, torch.bfloat16),
    "fp8": (4, torch.bfloat16),
}
"""Bytes of a weight (as of its gradient and of each moment), and the dtype in which FSDP2 gathers what is not FP8."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Matrix FLOPs of one training step, per token: forward 2, backward 4 per weight that trains.

    Args:
        fp8: in FP8.
        high_precision: in linear layers that are kept, and with other weights that tokens are multiplied with.
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
    fp8 = sum(_of(row) for row in plan.rows if row.kept_because is None)
    kept = sum(_of(row) for row in plan.rows if row.kept_because is not None)
    # scores and values: 2 products of 2 FLOPs, half the positions, three times with backward
    attention = 6.0 * sequence_length * attention_width
    return Flops(fp8=fp8, high_precision=kept, attention=attention)


def _of(row: PlanRow) -> float:
    gemms = 3 if row.trains else 2
    return 2.0 * gemms * row.per_token * row.in_features * row.out_features


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of a model under one precision with AdamW, before any sharding.

    Args:
        precision: the name.
        weights: of all weights.
        gradients: of all gradients.
        optimizer: AdamW's two moments, in the dtype of the weights; under MS-AMP its moments and masters.
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
    fp8_all_gather: bool = True,
    bytes_of_codes: tuple[int, int, int] | None = None,
) -> list[Bytes]:
    """Return the bytes under Lightning's fp32 and bf16 precisions, and under ``precision`` with this plan.

    Args:
        model: the model of the plan.
        plan: the layers that convert.
        precision: the name of the last row.
        fp8_all_gather: whether converted weights can be gathered as float8 (tensorwise recipes can).
        bytes_of_codes: for weights that are kept as codes, see ``PrecisionName.bytes_of_codes``.
    """
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    converted = sum(row.in_features * row.out_features for row in plan.rows if row.kept_because is None)
    rows = []
    for name, (size, dtype) in LAYOUT.items():
        in_fp8 = converted if name == "fp8" and fp8_all_gather else 0
        rows.append(
            Bytes(
                precision=precision if name == "fp8" else name,
                weights=size * total,
                gradients=size * trained,
                optimizer=2 * size * trained,
                gathered=gathered(Weights(fp8=in_fp8, other=total - in_fp8), dtype),
            )
        )
    return rows if bytes_of_codes is None else [*rows[:-1], _as_codes(rows[-1], plan, bytes_of_codes)]


def _as_codes(in_float32: Bytes, plan: Plan, bytes_of_codes: tuple[int, int, int]) -> Bytes:
    """Return the bytes when the plan's weights are kept as codes."""
    converted = [(row.in_features * row.out_features, row.trains) for row in plan.rows if row.kept_because is None]
    total = sum(size for size, _ in converted)
    trained = sum(size for size, trains in converted if trains)
    weight, gradient, moments = bytes_of_codes
    return replace(
        in_float32,
        weights=in_float32.weights - (4 - weight) * total,
        gradients=in_float32.gradients - (4 - gradient) * trained,
        optimizer=in_float32.optimizer - (8 - moments) * trained,
        gathered=0,
    )
