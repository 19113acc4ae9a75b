"""The all-gathers of a sharded model: weights as codes, and one log line that says what was sent.

FSDP2 gathers a group of parameters as one tensor. If their dtypes differ, FSDP2 sends uint8. If all of them are float8,
FSDP2 sends float8, which gloo does not know. :class:`ByteGather` sends one-byte floats as uint8, which changes no bit.
Parameters that stay float32 beside others are a second group of their module, with torch's own all-gather.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from lightning_lowprec.numerics.wire_format import reads_values, wired_weights
from lightning_lowprec.private.fsdp2 import gather_by, gathered_parameters
from lightning_lowprec.private.torch import local_tensor
from lightning_lowprec.private.torch_modules import is_batch_or_instance_norm
from lightning_lowprec.references import WeakList

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


@final
class ByteGather:
    """The all-gather of one FSDP2 group, the ``shards`` of this rank that are gathered together."""

    def __init__(self, shards: Sequence[Tensor] = (), layers: Sequence[nn.Module] = ()) -> None:
        self._layers = WeakList(layers)
        self.elements = sum(shard.numel() for shard in shards)
        self._has_fp8 = any(hasattr(shard, "fsdp_pre_all_gather") for shard in shards)
        self.calls: Counter[torch.dtype] = Counter()  # of this rank
        self.sent: Counter[torch.dtype] = Counter()  # bytes

    @property
    def has_fp8(self) -> bool:
        """Whether a weight of the group is gathered as codes, and not in high precision."""
        return self._has_fp8 and not (self._layers and all(map(reads_values, self._layers)))

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent or received; called by FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather; called by FSDP2. ``input_tensor``: (n,); ``output_tensor``: (ranks * n,), same dtype."""
        self.calls[input_tensor.dtype] += 1
        self.sent[input_tensor.dtype] += input_tensor.numel() * input_tensor.element_size()
        if input_tensor.is_floating_point() and input_tensor.element_size() == 1:
            input_tensor, output_tensor = input_tensor.view(torch.uint8), output_tensor.view(torch.uint8)
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


@final
class Traffic:
    """The all-gathers of all groups of a sharded model, by the fqn of the module; the root is ``""``."""

    def __init__(self, groups: Mapping[str, FSDPModule]) -> None:
        self.gathers: dict[str, ByteGather] = {}
        self._norms = {fqn for fqn, module in groups.items() if is_batch_or_instance_norm(cast(nn.Module, module))}
        for fqn, group in groups.items():
            module = cast(nn.Module, group)
            params = [record.sharded_param for record, _ in gathered_parameters(module)]
            ids = set(map(id, params))
            readers = [w.layer for w in wired_weights(module) if id(w.layer._parameters.get(w.name)) in ids]
            self.gathers[fqn] = ByteGather([local_tensor(p) for p in params], readers)
            gather_by(module, self.gathers[fqn])

    def report(self) -> str | None:
        """Return one line about what was sent so far; None before the first gather, or if this rank is alone."""
        gathered = {fqn: gather for fqn, gather in self.gathers.items() if gather.calls}
        if not gathered:
            return None
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
        if any(gather.has_fp8 for gather in self.gathers.values()):
            dtype = "float8"
        # a rank that has nothing of a group sends padding only
        return f"all-gather: {dtype}, {_size(sent / calls)} per {unit} and rank, {sent / max(in_bf16, 1):.2f}x of bf16"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} bytes"
