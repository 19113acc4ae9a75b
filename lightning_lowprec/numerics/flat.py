"""Many tensors as views of one flat buffer whose memory can be given back and taken again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

_ALIGN: Final = 8  # elements: every view starts at a multiple of 16 bytes, which vectorised kernels want


class FlatBuffer:
    """Tensors shaped and strided like ``like``, of ``dtype``, on one flat tensor; allocated, filled with zeros.

    ``views`` are plain tensors; ``tensors`` are the same memory as leaves of their own, and DTensors where ``like`` has
    them. Both are made once and stay the same objects, but while the buffer is freed, reading one is undefined
    behaviour (torch does not check it).
    """

    @torch.no_grad()
    def __init__(self, like: Sequence[Tensor], dtype: torch.dtype) -> None:
        shards = [local(t) for t in like]
        sizes = [-(-t.numel() // _ALIGN) * _ALIGN for t in shards]
        *offsets, total = accumulate(sizes, initial=0)
        self.flat = torch.zeros(total, dtype=dtype, device=like[0].device)
        # strides like the tensor's, if it is dense (channels_last): multi-tensor kernels want them equal
        self._layout = [
            (t.shape, torch.empty_like(t, device="meta").stride(), offset)
            for t, offset in zip(shards, offsets, strict=True)
        ]
        self._sharding = [_sharding(t) for t in like]
        self.views = self._views_on(self.flat)
        self.tensors = self.tensors_on(self.flat)
        self.allocated = True

    @torch.no_grad()
    def tensors_on(self, flat: Tensor) -> list[Tensor]:
        """Such ``tensors`` on another flat tensor of the same size."""
        return [shard(view) for shard, view in zip(self._sharding, self._views_on(flat), strict=True)]

    def _views_on(self, flat: Tensor) -> list[Tensor]:
        return [flat.as_strided(*layout) for layout in self._layout]

    def allocate(self) -> None:
        """Give the buffer memory, of undefined content if it had none."""
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self.allocated = True

    def free(self) -> None:
        """Give the memory back; the content is lost."""
        self.flat.untyped_storage().resize_(0)
        self.allocated = False


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor on this rank, sharing its memory; any other tensor as it is. Call without grad mode."""
    to_local: Any = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _sharding(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes a leaf of a local tensor, sharing its memory: a DTensor if ``tensor`` is one."""
    if not hasattr(tensor, "to_local"):
        return Tensor.detach
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    layout: Any = {"device_mesh": tensor.device_mesh, "placements": tensor.placements}
    whole: Any = {"shape": tensor.shape, "stride": tensor.stride()}
    return lambda view: DTensor.from_local(view, **layout, run_check=False, **whole).detach()
