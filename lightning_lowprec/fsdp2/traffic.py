"""The collectives of a sharded model: weights and gradients in float8, and one log line that says what was sent.

FSDP2 gathers a group of parameters as one tensor. If their dtypes differ, FSDP2 sends uint8. If all of them are float8,
FSDP2 sends float8, which gloo does not know. :class:`ByteGather` sends one-byte floats as uint8, which changes no bit.
Parameters that stay float32 beside others are a second group of their module, with torch's own collectives.

`FSDP2Strategy(fp8_reduce=True)` reduces gradients in float8. With n ranks per copy, and values in float32, bfloat16 or
float16:

    gradients of one group, cut into n rows, one per rank     allocated and filled by FSDP2
      --encode: float8_e4m3fn, one scale per 128 values--> bytes --all-to-all--> the n rows for this rank
      --decode and sum in float32--> gradients of this rank's shards

With copies of the model (HSDP), FSDP2 reduces within a copy in its own way, and the sums are averaged in float8 between
the copies:

    gradients of this rank's shards --encode--> bytes --all-to-all--> one part of every copy's
      --decode and sum in float32, encode--> bytes --all-gather--> decode: the same bits in every copy

FSDP2 calls these on its own stream, where they wait for each other and the host waits for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_lowprec.numerics.fp8_blocks import decode_sum_, row_bytes, to_bytes
from lightning_lowprec.numerics.wire_format import reads_values, wired_weights
from lightning_lowprec.private.fsdp2 import first_group, gathered_parameters, reduce_copies_by
from lightning_lowprec.private.torch import local_tensor
from lightning_lowprec.private.torch_modules import is_batch_or_instance_norm
from lightning_lowprec.references import WeakList

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class Collective:
    """A collective of one FSDP2 group; torch asks for this method and for a call."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent or received; called by FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)


@final
class ByteGather(Collective):
    """The all-gather of one FSDP2 group, the ``shards`` of this rank that are gathered together."""

    def __init__(self, shards: Sequence[Tensor] = (), layers: Sequence[nn.Module] = ()) -> None:
        self._layers = WeakList(layers)
        self.elements = sum(shard.numel() for shard in shards)
        self._has_fp8 = any(hasattr(shard, "fsdp_pre_all_gather") for shard in shards)
        self.calls: Counter[torch.dtype] = Counter()  # of this rank
        self.sent: Counter[torch.dtype] = Counter()  # bytes

    @property
    def has_fp8(self) -> bool:
        """Whether a weight of the group is gathered as float8 now, and not in high precision (a phase, a demotion)."""
        return self._has_fp8 and not (self._layers and all(map(reads_values, self._layers)))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather; called by FSDP2. ``input_tensor``: (n,); ``output_tensor``: (ranks * n,), same dtype."""
        self.calls[input_tensor.dtype] += 1
        self.sent[input_tensor.dtype] += input_tensor.numel() * input_tensor.element_size()
        if input_tensor.is_floating_point() and input_tensor.element_size() == 1:
            input_tensor, output_tensor = input_tensor.view(torch.uint8), output_tensor.view(torch.uint8)
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class Reductions(Collective):
    """Count what the float8 reductions of one FSDP2 group send."""

    def __init__(self) -> None:
        self.calls = 0
        self.sent = 0  # bytes, to other ranks
        self.values = 0  # to other ranks; in float32 they would be four bytes each

    def count(self, ranks: int, values: int, *, times: int = 1) -> None:
        """Count a reduction in which this rank sent ``values`` to every other one of ``ranks``, so many times."""
        self.calls += 1
        self.sent += times * (ranks - 1) * row_bytes(values)
        self.values += times * (ranks - 1) * values


@final
class Fp8ReduceScatter(Reductions):
    """The reduce-scatter of one FSDP2 group."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum or average (ranks * n,) to (n,), both float32, bfloat16 or float16; called by FSDP2.

        ``op`` is SUM, AVG, or a sum of multiples of the values (``set_gradient_divide_factor``).
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
        self.count(ranks, output_tensor.numel())


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
        self.count(copies, rows.shape[1], times=2)


def reduce_in_fp8(groups: Mapping[str, FSDPModule], mesh: DeviceMesh) -> dict[str, Reductions]:
    """Let FSDP2 reduce the gradients of ``groups`` in float8; with copies, between the copies only.

    The ``mesh`` is that of ``fully_shard``: ``(shards,)`` or ``(copies, shards)``.
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


@final
class Traffic:
    """The collectives of all groups of a sharded model, by the fqn of the module; the root is ``""``.

    ``reductions`` are those in float8; others are torch's own and not counted.
    """

    def __init__(self, groups: Mapping[str, FSDPModule], reductions: Mapping[str, Reductions]) -> None:
        self.gathers: dict[str, ByteGather] = {}
        self.reductions = reductions
        self._norms = {fqn for fqn, module in groups.items() if is_batch_or_instance_norm(cast(nn.Module, module))}
        for fqn, group in groups.items():
            module = cast(nn.Module, group)
            params = [record.sharded_param for record, _ in gathered_parameters(module)]
            ids = set(map(id, params))
            readers = [w.layer for w in wired_weights(module) if id(w.layer._parameters.get(w.name)) in ids]
            self.gathers[fqn] = ByteGather([local_tensor(p) for p in params], readers)
            custom: Any = self.gathers[fqn]  # torch's interface, a private class, asks for these two methods
            with first_group(module) as alone:
                alone.set_custom_all_gather(custom)

    def report(self) -> str | None:
        """Return one line about what was sent so far; None before the first gather, or if this rank is alone."""
        gathered = {fqn: gather for fqn, gather in self.gathers.items() if gather.calls}
        reductions = [reduction for reduction in self.reductions.values() if reduction.calls]
        lines = [self._gathered(gathered)] if gathered else []
        if reductions:
            calls, sent = sum(r.calls for r in reductions), sum(r.sent for r in reductions)
            ratio = sent / (4 * sum(r.values for r in reductions))
            where = "all-reduce between copies" if isinstance(reductions[0], Fp8Average) else "reduce-scatter"
            lines.append(f"{where}: float8, {_size(sent / calls)} per group and rank, {ratio:.2f}x of float32")
        return "; ".join(lines) or None

    def _gathered(self, gathered: Mapping[str, ByteGather]) -> str:
        for fqn, gather in gathered.items():
            wide = next((_name(dtype) for dtype in gather.sent if dtype.itemsize > 1), None)
            if gather.has_fp8 and wide is not None:
                raise RuntimeError(
                    f"the weights of {fqn or 'the root'!r} were to be gathered as float8, but {wide} was sent. Use"
                    " `fp8_all_gather=False`, and please report it."
                )
        blocks = [gather for fqn, gather in gathered.items() if fqn and fqn not in self._norms]
        unit = "block" if blocks else "gather"
        blocks = blocks or list(gathered.values())
        calls = sum(gather.calls.total() for gather in blocks)
        sent = sum(gather.sent.total() for gather in blocks)
        in_bf16 = sum(2 * gather.elements * gather.calls.total() for gather in blocks)
        dtype = " and ".join(sorted({_name(dtype) for gather in blocks for dtype in gather.calls}))
        dtype = "float8" if any(gather.has_fp8 for gather in self.gathers.values()) else dtype
        # a rank that has nothing of a group sends padding only
        return f"all-gather: {dtype}, {_size(sent / calls)} per {unit} and rank, {sent / max(in_bf16, 1):.2f}x of bf16"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} bytes"
