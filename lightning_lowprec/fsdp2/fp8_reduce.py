"""Reduce gradients in float8: `FSDP2Strategy(fp8_reduce=True)`.

With n ranks per copy, and values in float32, bfloat16 or float16:

    gradients of one group, cut into n rows, one per rank     allocated and filled by FSDP2
      --encode: float8_e4m3fn, one scale per 128 values--> bytes --all-to-all--> the n rows for this rank
      --decode and sum in float32--> gradients of this rank's shards

With copies of the model (HSDP), FSDP2 reduces within a copy in its own way, and the sums are averaged in float8 between
the copies:

    gradients of this rank's shards --encode--> bytes --all-to-all--> one part of every copy's
      --decode and sum in float32, encode--> bytes --all-gather--> decode: the same bits in every copy

FSDP2 calls both on its own stream, where they wait for each other and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_lowprec.numerics.fp8_blocks import decode_sum_, row_bytes, to_bytes
from lightning_lowprec.private.fsdp2 import first_group, reduce_copies_by

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class Reductions:
    """Count what the float8 reductions of one FSDP2 group send."""

    def __init__(self) -> None:
        self.calls = 0
        """The number of reductions."""
        self.sent = 0
        """The bytes that this rank sent to other ranks."""
        self.values = 0
        """The values that this rank sent to other ranks; in float32 they would be four bytes each."""

    def count(self, sent: int, values: int) -> None:
        """Count one reduction."""
        self.calls += 1
        self.sent += sent
        self.values += values


@final
class Fp8ReduceScatter(Reductions):
    """The reduce-scatter of one FSDP2 group; torch asks for these two methods."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for gradients, or for their sums; called by FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum or average over the ranks of ``group``; called by FSDP2, which does not ask for ``async_op``.

        Args:
            output_tensor: (n,) float32, bfloat16 or float16; overwritten.
            input_tensor: (ranks * n,), the same dtype.
            group: the ranks.
            op: SUM, AVG, or a sum of multiples of the values (``set_gradient_divide_factor``).
            async_op: must be False.

        Raises:
            ValueError: ``op`` is another reduction, or ``async_op`` is True.
        """
        ranks = group.size()
        factor = _factor(op, ranks)
        if async_op:
            raise ValueError(
                "`async_op=True` is not possible with `fp8_reduce=True`, and FSDP2 is not known to ask for it."
                " Use `fp8_reduce=False`, and please report it."
            )
        sent = to_bytes(input_tensor.view(ranks, -1))
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=group)
        decode_sum_(output_tensor.view(1, -1), arrived[:, None], factor)
        self.count((ranks - 1) * row_bytes(output_tensor.numel()), (ranks - 1) * output_tensor.numel())


def _factor(op: Any, ranks: int) -> float:
    """Return what a reduction multiplies the sum with."""
    kinds: Any = dist.ReduceOp
    if op in (kinds.SUM, kinds.AVG):
        return 1 / ranks if op == kinds.AVG else 1.0
    kind, factor = op.__getstate__()  # torch 2.11 shows the factor in no other way
    if kind != kinds.PREMUL_SUM:
        raise ValueError(f"`fp8_reduce=True` got the reduction {kind}; expected SUM, AVG or PREMUL_SUM.")
    return float(factor)


@final
class Fp8Average(Reductions):
    """The reduction of one FSDP2 group between the copies of the model."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __call__(self, shards: Tensor, averages: bool) -> None:
        """Average over the copies in place, or sum: (n,) float32, bfloat16 or float16."""
        copies, n = self._group.size(), shards.numel()
        whole = shards if n % copies == 0 else torch.nn.functional.pad(shards, (0, -n % copies))
        rows = whole.view(copies, -1)
        sent = to_bytes(rows)
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self._group)
        reduced = torch.empty(1, rows.shape[1], device=shards.device)
        decode_sum_(reduced, arrived[:, None], 1 / copies if averages else 1.0)
        _all_gather(sent, to_bytes(reduced), group=self._group)
        decode_sum_(rows, sent[None])
        if whole is not shards:
            shards.copy_(whole[:n])
        if shards.is_cuda:
            shards.record_stream(torch.cuda.current_stream(shards.device))  # FSDP2 allocated it on another stream
        self.count(2 * (copies - 1) * row_bytes(rows.shape[1]), 2 * (copies - 1) * rows.shape[1])


def reduce_in_fp8(groups: Mapping[str, FSDPModule], mesh: DeviceMesh) -> dict[str, Reductions]:
    """Let FSDP2 reduce the gradients of ``groups`` in float8; with copies, between the copies only.

    Args:
        groups: modules by fqn, each with parameters that are gathered as one.
        mesh: of ``fully_shard``: ``(shards,)`` or ``(copies, shards)``.
    """
    reductions: dict[str, Reductions] = {}
    for fqn, module in groups.items():
        if mesh.ndim == 1:
            reductions[fqn] = scatter = Fp8ReduceScatter()
            with first_group(cast(nn.Module, module)) as alone:
                alone.set_custom_reduce_scatter(cast(Any, scatter))  # torch's interface is a private class
        else:
            reductions[fqn] = average = Fp8Average(mesh.get_group(0))
            reduce_copies_by(cast(nn.Module, module), average)
    return reductions
