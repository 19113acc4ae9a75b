"""The weights of a live model as a server multiplies by them: codes, one byte each, made when they are first used.

    weight --encode, once--> codes and scales, kept --decode, at each forward--> values of one layer

Of a weight that FSDP2 shards, every rank keeps its part of the codes, and gathers the codes at each forward.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override

from lightning_lowprec.numerics.weight_rounding import spread
from lightning_lowprec.serving.coding import coded, largest
from lightning_lowprec.serving.content import Content


class ServedWeight(ABC):
    """A weight in the place of the model's."""

    @abstractmethod
    def values(self, like: Tensor) -> Tensor:
        """Return the whole weight, in the dtype and on the device of ``like``: the shape that the model has."""


@final
class KeptWeight(ServedWeight):
    """A weight that the server has in high precision; of a sharded one every forward gathers the values."""

    def __init__(self, content: Content, name: str) -> None:
        self._content, self._name = content, name

    @override
    def values(self, like: Tensor) -> Tensor:
        return _values(self._content, self._name).to(like)


@final
class CodedWeight(ServedWeight):
    """A weight that the server has as codes.

    Args:
        content: says how the weight is rounded, and has the values.
        name: of the weight.
        shapes: of the matrices that the server has of it, each [N, K]: of stacked experts several, else one.
        parameter: between forwards; a DTensor: codes are sharded as the parameter is.
    """

    def __init__(
        self, content: Content, name: str, shapes: Sequence[tuple[int, int]], parameter: Tensor | None
    ) -> None:
        self._content, self._name, self._shapes = content, name, shapes
        self._mesh = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        self._codes: Tensor | None = None
        """[...] uint8, the bits of e4m3: a DTensor has no operations on e4m3."""
        self._scales: list[Tensor] = []
        """For each matrix, the grid of reciprocal scales."""

    @override
    def values(self, like: Tensor) -> Tensor:
        if self._codes is None:
            with torch.autocast(like.device.type, enabled=False), torch.inference_mode(False), torch.no_grad():
                self._codes = self._encode()
        codes = self._codes.full_tensor() if isinstance(self._codes, DTensor) else self._codes
        shape, codes = codes.shape, codes.to(like.device).view(torch.float8_e4m3fn)
        found = torch.empty(shape, dtype=like.dtype, device=like.device)
        parts = zip(self._matrices(found), self._matrices(codes), self._scales, strict=True)
        for target, part, scales in parts:
            target.copy_(part.float().mul_(spread(scales.to(like.device), part.shape)))
        return found

    def _matrices(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the matrices that a tensor of the weight's shape holds, as views."""
        return tensor.view(len(self._shapes), *self._shapes[0]).unbind()

    def _encode(self) -> Tensor:
        content, whole = self._content, _values(self._content, self._name)
        scale_per, rounding = content.format.scale_per, content.choice.roundings[self._name]
        assert scale_per is not None
        amax = None
        if rounding is not None and rounding.scale_per == "tensor":
            amax = largest(lambda start, stop: whole[start:stop], tuple(whole.shape))
        codes = torch.empty(whole.shape, dtype=torch.float8_e4m3fn, device=whole.device)
        self._scales = []
        for target, matrix, shape in zip(self._matrices(codes), self._matrices(whole), self._shapes, strict=True):
            rows = partial(_rows, matrix)
            made: dict[str, list[Tensor]] = {"codes": [], "scales": []}
            for kind, part in coded(rows, shape, scale_per, rounding, amax, content.tally, checks=False):
                made[kind].append(part)
            target.copy_(torch.cat(made["codes"]))
            self._scales.append(torch.cat(made["scales"]))
        bits = codes.view(torch.uint8)
        return bits if self._mesh is None else distribute_tensor(bits, *self._mesh, src_data_rank=None)


def _rows(matrix: Tensor, start: int, stop: int) -> Tensor:
    return matrix[start:stop]


def _values(content: Content, name: str) -> Tensor:
    """Return the whole weight, values; of a sharded one a collective."""
    shape = content.source.shapes()[name].size
    with torch.inference_mode(False), torch.no_grad():
        found = content.source.rows(name, 0, shape[0] if shape else 1)
    assert found.numel() == math.prod(shape)
    return found.contiguous()
