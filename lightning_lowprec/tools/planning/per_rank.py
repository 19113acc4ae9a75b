"""The bytes that one rank of ``strategy="fsdp2"`` holds and sends, for a plan and numbers of shards and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from lightning_lowprec import names
from lightning_lowprec.checks import check_integer
from lightning_lowprec.conversion.plan import Plan, PlanRow
from lightning_lowprec.fsdp2.options import blocks
from lightning_lowprec.tools.planning import volume
from lightning_lowprec.tools.planning.costs import Bytes, gathered_rows
from lightning_lowprec.tools.planning.volume import Volume, Weights

_FLOAT32: Final = 4
_SCALES_OF_CODES: Final = 3  # of the weight and of two moments


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Bytes of one rank under one precision, with AdamW.

    Args:
        precision: the name.
        state: weights, gradients, masters and moments of this rank, and the codes that the rank keeps of its shards.
        in_flight: an upper bound of gathered weights and of gradients on their way, at once; no activations.
        sent: what the rank sends in one step of one micro-batch, in rings.
    """

    precision: str
    state: float
    in_flight: int
    sent: Volume


def per_rank(
    model: nn.Module,
    plan: Plan,
    sizes: Sequence[Bytes],
    *,
    shards: int,
    copies: int = 1,
    bytes_of_codes: tuple[int, int, int] | None = None,
    parts: Callable[[str], int] = lambda fqn: 1,
    tensor_parallel: int = 1,
) -> list[Rank]:
    """Return the bytes of a rank for every precision that runs under FSDP2.

    Args:
        model: the model of the plan, not sharded.
        plan: the layers that convert.
        sizes: of :func:`~lightning_lowprec.tools.planning.costs.footprints`; the plan belongs to the last row.
        shards: ranks per copy of the model.
        copies: copies of the model (``replicate``).
        bytes_of_codes: as in ``footprints``; FSDP2 keeps gradients of such weights in float32.
        parts: into how many parts tensor parallelism cuts the parameter of an fqn.
        tensor_parallel: ranks of a tensor-parallel group.

    Raises:
        ValueError: ``shards`` or ``copies`` is below 1, or float8 weights do not divide into ``shards`` equal parts.
    """
    check_integer("shards", shards, least=1)
    ranks = []
    for row in sizes:
        if not row.gathered:  # does not run under FSDP2
            continue
        elements = sum(p.numel() for p in model.parameters())
        param_dtype = torch.float32 if row.gathered == _FLOAT32 * elements else torch.bfloat16
        coded = gathered_rows(plan, row.precision)
        if row is not sizes[-1] or row.gathered >= param_dtype.itemsize * elements:
            coded = []
        _check_even(coded, shards)
        groups = volume.weights_of(
            model, [found.fqn for found in coded], blocks=blocks(model), shards=shards, parts=parts
        )
        root, below = groups.pop(""), list(groups.values())
        together = sum(below, Weights())
        of_codes = bytes_of_codes if row is sizes[-1] else None
        if of_codes is not None:  # the step reduces the scales of codes and moments
            together = replace(together, fp8_weights=_SCALES_OF_CODES * together.fp8_weights)
        keeps = of_codes is None and _keeps_codes(row.precision)
        kept = together.fp8 + root.fp8 if keeps else 0  # codes of shards in high precision, 1 byte each
        sent = volume.step(
            together, root, shards=shards, copies=copies, param_dtype=param_dtype, tensor_parallel=tensor_parallel
        )
        largest = max(below, key=lambda weights: weights.total, default=Weights())
        ranks.append(
            Rank(
                precision=row.precision,
                state=(_state(row, plan, of_codes) * (together.total + root.total) / elements + kept) / shards,
                in_flight=volume.in_flight(largest, root, param_dtype=param_dtype),
                sent=sent,
            )
        )
    return ranks


def _check_even(rows: Sequence[PlanRow], shards: int) -> None:
    for row in rows:
        side, size = ("input", row.in_features) if row.kind == "Conv1D" else ("output", row.out_features)
        if size % shards:
            raise ValueError(
                f"`shards={shards}` is not possible: {row.fqn!r} has {size} {side} features, which do not"
                " divide into equal shards, and uneven shards cannot be gathered in float8. Keep the layer out of FP8"
                " (`--keep`), or take a divisor (`--shards`)."
            )


def _keeps_codes(precision: str) -> bool:
    """Return whether the plugin of this name keeps the codes of its shards from gather to gather."""
    row = names.TABLE.get(precision)
    return row is None or row.options.get("weight_codes") != "per_gemm"


def _state(row: Bytes, plan: Plan, of_codes: tuple[int, int, int] | None) -> int:
    """Return the bytes of a model's state; gradients of weights that are kept as codes are float32."""
    wider = 0 if of_codes is None else _FLOAT32 - of_codes[1]
    return row.state + wider * sum(
        r.in_features * r.out_features for r in plan.rows if r.kept_because is None and r.trains
    )
