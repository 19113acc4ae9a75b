"""What FSDP2 sends: every all-gather of parameters, with its dtype and bytes; and float8 where the backend refuses it.

FSDP2 sends a group of parameters as uint8 if their dtypes differ. A group of nothing but float8 weights goes as float8,
which gloo does not know; here one-byte floats always travel as uint8, which changes no bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm


class Counts:
    """Calls and bytes that this rank put in, by dtype: ``calls[dtype]``, ``sent[dtype]``."""

    def __init__(self) -> None:
        self.calls: Counter[torch.dtype] = Counter()
        self.sent: Counter[torch.dtype] = Counter()

    def note(self, tensor: Tensor) -> None:
        """One call that sends ``tensor``."""
        self.calls[tensor.dtype] += 1
        self.sent[tensor.dtype] += tensor.numel() * tensor.element_size()


class ByteGather(DefaultAllGather):
    """The all-gather of one FSDP2 group, counted."""

    def __init__(self) -> None:
        self.traffic = Counts()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """``input_tensor``: [n]; ``output_tensor``: [ranks * n], same dtype."""
        self.traffic.note(input_tensor)
        if input_tensor.is_floating_point() and input_tensor.element_size() == 1:
            input_tensor, output_tensor = input_tensor.view(torch.uint8), output_tensor.view(torch.uint8)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class CountedScatter(DefaultReduceScatter):
    """The reduce-scatter of one FSDP2 group, counted."""

    def __init__(self) -> None:
        self.traffic = Counts()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """``input_tensor``: [ranks * n]; ``output_tensor``: [n], same dtype."""
        self.traffic.note(input_tensor)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


class Traffic:
    """The collectives of every group of a sharded model.

    Args:
        groups: by fqn: what is gathered as one; the root is ``""``.
        param_dtype: what weights are gathered as that are not gathered as float8; None: as they are.
    """

    def __init__(self, groups: Mapping[str, FSDPModule], param_dtype: torch.dtype | None) -> None:
        self.gathers: dict[str, ByteGather] = {}
        self.scatters: dict[str, CountedScatter] = {}
        self._promised: dict[str, int] = {}
        self._in_bf16: dict[str, int] = {}
        self._in_high_precision: dict[str, int] = {}
        self._has_fp8 = False
        self._norms = {fqn for fqn, module in groups.items() if isinstance(module, _BatchNorm)}
        for fqn, module in groups.items():
            self.gathers[fqn], self.scatters[fqn] = ByteGather(), CountedScatter()
            module.set_custom_all_gather(self.gathers[fqn])
            module.set_custom_reduce_scatter(self.scatters[fqn])
            self._expect(fqn, _shards(module, groups), None if fqn in self._norms else param_dtype)

    def _expect(self, fqn: str, shards: list[Tensor], param_dtype: torch.dtype | None) -> None:
        fp8 = sum(t.numel() for t in shards if _in_fp8(t))
        rest = [t for t in shards if not _in_fp8(t)]
        sizes = {t: (param_dtype or t.dtype).itemsize for t in shards}
        self._has_fp8 = self._has_fp8 or fp8 > 0
        self._promised[fqn] = fp8 + sum(t.numel() * sizes[t] for t in rest)
        self._in_bf16[fqn] = 2 * sum(t.numel() for t in shards)
        self._in_high_precision[fqn] = sum(t.numel() * sizes[t] for t in shards)

    def check(self) -> str | None:
        """What was gathered so far, in one line; None before the first gather, or if this rank is alone.

        Raises:
            RuntimeError: float8 was promised and more bytes were sent than it has.
        """
        gathered = {fqn: gather.traffic for fqn, gather in self.gathers.items() if gather.traffic.calls}
        if not gathered:
            return None
        for fqn, traffic in gathered.items():
            sent = traffic.sent.total() / traffic.calls.total()
            promised, otherwise = self._promised[fqn], self._in_high_precision[fqn]
            if self._has_fp8 and sent > (promised + otherwise) / 2 > promised:  # padding is far less than that
                raise RuntimeError(
                    f"the weights of {fqn or 'the root'!r} were to be gathered as float8 ({promised} bytes per rank),"
                    f" but {sent:.0f} bytes were sent. Use `fp8_all_gather=False`, and please report it."
                )
        blocks = {fqn: traffic for fqn, traffic in gathered.items() if fqn and fqn not in self._norms} or gathered
        sent = sum(t.sent.total() for t in blocks.values()) / sum(t.calls.total() for t in blocks.values())
        in_bf16 = sum(self._in_bf16[fqn] * t.calls.total() for fqn, t in blocks.items())
        ratio = sum(t.sent.total() for t in blocks.values()) / in_bf16
        dtype = (
            "float8" if self._has_fp8 else " and ".join(sorted({_name(d) for t in blocks.values() for d in t.calls}))
        )
        unit = "gather" if "" in blocks else "block"
        return f"all-gather: {dtype}, {_size(sent)} per {unit} and rank, {ratio:.2f}x of bf16"


def _in_fp8(shard: Tensor) -> bool:
    return hasattr(shard, "fsdp_pre_all_gather")  # a Fp8GatherShard, whose module imports torchao


def _shards(module: FSDPModule, groups: Mapping[str, FSDPModule]) -> list[Tensor]:
    """The local shards of the parameters that ``module`` gathers, which are not those of groups inside of it."""
    inner = {id(p) for m in groups.values() if m is not module and _contains(module, m) for p in _parameters(m)}
    return [cast(DTensor, p)._local_tensor for p in _parameters(module) if id(p) not in inner]


def _contains(outer: Any, inner: Any) -> bool:
    return any(module is inner for module in outer.modules())


def _parameters(module: Any) -> list[Tensor]:
    return list(module.parameters())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} bytes"
