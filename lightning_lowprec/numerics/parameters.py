"""The parameters of an optimizer, and lists of parameters that are handled at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def chunks(parameters: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield the parameters in their order, in lists of at most ``limit`` elements, or of one larger parameter."""
    chunk: list[Tensor] = []
    room = limit
    for p in parameters:
        if chunk and p.numel() > room:
            yield chunk
            chunk, room = [], limit
        chunk.append(p)
        room -= p.numel()
    if chunk:
        yield chunk
