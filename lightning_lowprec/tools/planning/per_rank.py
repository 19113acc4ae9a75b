"""The bytes that one rank of ``strategy="fsdp2"`` holds and sends, for a plan and numbers of shards and copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import nn

from lightning_lowprec import names
from lightning_lowprec.checks import check_integer
from lightning_lowprec.conversion.matmuls import CONV1D, STACKED
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.conversion.plan_row import PlanRow
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
    fp8_all_gather: bool | Mapping[str, bool] = True,
    parts: Callable[[str], int] = lambda fqn: 1,
    tensor_parallel: int = 1,
    fp8_reduce: bool = False,
) -> list[Rank]:
    """Return the bytes of a rank for every precision that runs under FSDP2.

    Args:
        model: the model of the plan, not sharded.
        plan: the layers that convert.
        sizes: of :func:`~lightning_lowprec.tools.planning.costs.footprints`; the plan belongs to the last row.
        shards: ranks per copy of the model.
        copies: copies of the model (``replicate``).
        fp8_all_gather: as in ``footprints``.
        parts: into how many parts tensor parallelism cuts the parameter of an fqn.
        tensor_parallel: ranks of a tensor-parallel group.
        fp8_reduce: whether gradients are reduced in float8 (``FSDP2Strategy(fp8_reduce=True)``).

    Raises:
        ValueError: ``shards`` or ``copies`` is below 1, or float8 weights do not divide into ``shards`` equal parts.
    """
    check_integer("shards", shards, least=1)
    codes = volume.codes_in_flight(shards, copies) if fp8_reduce else 0.0
    step = partial(volume.step, shards=shards, copies=copies, tensor_parallel=tensor_parallel, fp8_reduce=fp8_reduce)
    ranks = []
    for row in sizes:
        if not row.gathered:  # does not run under FSDP2
            continue
        elements = sum(p.numel() for p in model.parameters())
        param_dtype = torch.float32 if row.gathered == _FLOAT32 * elements else torch.bfloat16
        as_codes = row is sizes[-1] and row.gathered < param_dtype.itemsize * elements
        fp8 = _coded(gathered_rows(plan, row.precision, fp8_all_gather), shards) if as_codes else []
        groups = volume.weights_of(model, fp8, blocks=blocks(model), shards=shards, parts=parts)
        root, below = groups.pop(""), list(groups.values())
        together = sum(below, Weights())
        table_row = names.TABLE.get(row.precision)
        of_codes = table_row is not None and table_row.keeps_codes
        if of_codes:  # the step reduces the scales of codes and moments
            together = replace(together, fp8_weights=_SCALES_OF_CODES * together.fp8_weights)
        keeps = not of_codes and _keeps_codes(row.precision)
        kept = together.fp8 + root.fp8 if keeps else 0  # codes of shards in high precision, 1 byte each
        largest = max(below, key=lambda weights: weights.total, default=Weights())
        ranks.append(
            Rank(
                precision=row.precision,
                state=(_state(row, plan, of_codes) * (together.total + root.total) / elements + kept) / shards,
                in_flight=volume.in_flight(largest, root, param_dtype=param_dtype, codes=codes),
                sent=step(together, root, param_dtype=param_dtype),
            )
        )
    return ranks


def _coded(rows: Sequence[PlanRow], shards: int) -> list[str]:
    """Return the fqns of weights that are gathered as float8; raise ValueError if one has no equal shards."""
    for row in rows:
        if row.parts % shards:
            kinds = {STACKED: "experts", CONV1D: "input features"}
            parts = f"{row.parts} {kinds.get(row.kind, 'output features')}"
            raise ValueError(
                f"`shards={shards}` is not possible: {row.fqn!r} has {parts}, which do not"
                " divide into equal shards, and uneven shards cannot be gathered in float8. Keep the layer out of FP8"
                " (`--keep`), or take a divisor (`--shards`)."
            )
    return [row.fqn for row in rows]


def _keeps_codes(precision: str) -> bool:
    """Return whether the plugin of this name keeps the codes of its shards from gather to gather."""
    row = names.TABLE.get(precision)
    return row is None or row.options.get("weight_codes") != "per_gemm"


def _state(row: Bytes, plan: Plan, of_codes: bool) -> int:
    """Return the bytes of a model's state; FSDP2 keeps gradients of weights that are codes in float32."""
    wider = _FLOAT32 - 1 if of_codes else 0
    return row.state + wider * sum(r.elements for r in plan.rows if r.kept_because is None and r.trains)
