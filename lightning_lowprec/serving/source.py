"""The tensors of a live model as a source; `checkpoints/weights.py` has the sources that are checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_lowprec.checkpoints.optimizer_state import clean
from lightning_lowprec.checkpoints.weights import Shape, Source
from lightning_lowprec.private.torch import with_local_tensor


@final
class LiveModel(Source):
    """A model; of a sharded one, all ranks read the same rows in the same order, and each gathers whole tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = named_tensors(model)
        self._gathered: tuple[str, Tensor] | None = None

    @override
    def shapes(self) -> Mapping[str, Shape]:
        return {name: Shape(tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}

    @override
    @torch.no_grad()
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        tensor = self._tensors[name].detach()
        if isinstance(tensor, DTensor):
            if self._gathered is None or self._gathered[0] != name:
                self._gathered = None  # frees the last one first
                self._gathered = name, whole(tensor)
            tensor = self._gathered[1]
        return values_of(tensor[start:stop] if tensor.dim() else tensor.reshape(1))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a state dict by name, without names of wrappers; a tied tensor once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found[clean(name)] = tensor
    return found


def values_of(tensor: Tensor) -> Tensor:
    """Return a tensor of torch's own class with the same values."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def whole(tensor: DTensor) -> Tensor:
    """Gather a sharded tensor; a collective."""
    local = values_of(tensor.to_local())
    gathered: Tensor = with_local_tensor(local, tensor).full_tensor()
    return gathered
