"""Keep many tensors as views of one flat buffer, whose memory can be freed and allocated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_lowprec.private.torch import dtensor

_ALIGN: Final = 8  # elements: every view starts at a multiple of 16 bytes, as vectorised kernels prefer


def aligned(elements: int) -> int:
    """Return how many elements of a flat buffer a tensor takes."""
    return -(-elements // _ALIGN) * _ALIGN


@final
class FlatBuffer:
    """Tensors with the shapes and strides of ``like``, on one flat tensor of ``dtype`` that starts with zeros.

    ``views`` are plain tensors. ``tensors`` share their memory and are leaves; where ``like`` has DTensors, they are
    DTensors. Both are made once and stay the same objects. ``offsets`` are the first elements of the views. While the
    buffer is freed, reading views or tensors is undefined behaviour (torch does not check it).
    """

    @torch.no_grad()
    def __init__(self, like: Sequence[Tensor], dtype: torch.dtype) -> None:
        shards = [local(t) for t in like]
        sizes = [aligned(t.numel()) for t in shards]
        *self.offsets, total = accumulate(sizes, initial=0)
        self.flat = torch.zeros(total, dtype=dtype, device=like[0].device)
        # a dense tensor keeps its strides (channels_last): multi-tensor kernels need equal strides
        self._layout = [
            (t.shape, torch.empty_like(t, device="meta").stride(), offset)
            for t, offset in zip(shards, self.offsets, strict=True)
        ]
        self._sharding = [_sharding(t) for t in like]
        self.views = self.views_on(self.flat)
        self.tensors = self.tensors_on(self.flat)
        self.allocated = True

    @torch.no_grad()
    def tensors_on(self, flat: Tensor) -> list[Tensor]:
        """Return new ``tensors`` on another flat tensor of the same size."""
        return [shard(view) for shard, view in zip(self._sharding, self.views_on(flat), strict=True)]

    def views_on(self, flat: Tensor) -> list[Tensor]:
        """Return new ``views`` on another flat tensor of the same size."""
        return [flat.as_strided(*layout) for layout in self._layout]

    def parts(self) -> list[Tensor]:
        """Return the elements of every view, in the order of the memory: views of ``flat``."""
        sizes = [view.numel() for view in self.views]
        return [self.flat[at : at + size] for at, size in zip(self.offsets, sizes, strict=True)]

    def allocate(self) -> None:
        """Allocate the memory; the content is undefined if the buffer had none."""
        if self.allocated:  # torch would allocate a second time, and copy
            return
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        self.allocated = True

    def free(self) -> None:
        """Free the memory; the content is lost."""
        self.flat.untyped_storage().resize_(0)
        self.allocated = False


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, sharing memory, and any other tensor unchanged; call without grad mode."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharding(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function from a local tensor to a leaf that shares its memory: a DTensor if ``tensor`` is a DTensor."""
    if not isinstance(tensor, DTensor):
        return Tensor.detach
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return lambda view: dtensor(view, mesh, placements, shape, stride).detach()
