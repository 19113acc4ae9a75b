"""Bytes that a rank sends per training step under FSDP2, by formula.

With n shards, c copies, and P bytes of some weights in the dtype in which they are sent, ring collectives send per rank

    all-gather       (n - 1) / n * P          # in forward, and again in backward where weights were freed
    reduce-scatter   (n - 1) / n * P          # P: the gradients, in the reduce dtype
    all-reduce       2 (c - 1) / c * P / n    # HSDP: the shards of gradients, over the copies
    scales           2 (n - 1) / n * 4 k      # one float32 per FP8 weight, all k in one all-reduce

With ``fp8_reduce`` a gradient has 1 + 4 / 128 bytes: in the all-reduce if there are copies, else in the reduce-scatter.
Rows are multiples of 16 bytes, and their last blocks are shorter, which adds less than 20 bytes per group and rank.

The root (embeddings, head, last norm) stays gathered between forward and backward unless ``reshard_after_forward`` is
True. FSDP2 cuts the first dimension into equal parts, so a dimension that n does not divide is padded:
:func:`weights_of` counts the padding. Not counted: buffers, what tensor parallelism sends, gradient accumulation (each
micro-batch gathers and reduces again). Algorithms other than rings, such as NCCL's trees, send other amounts for the
same call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from lightning_lowprec.checks import check_integer
from lightning_lowprec.numerics.fp8_blocks import BYTES_PER_VALUE


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Numbers of parameters that are gathered.

    Args:
        fp8: parameters that are gathered as float8.
        fp8_weights: tensors that hold the parameters in ``fp8``; each tensor has a scale.
        other: parameters that are gathered in high precision.
        frozen: parameters among ``fp8`` and ``other`` that do not train: gathered, but without gradients.
    """

    fp8: int = 0
    fp8_weights: int = 0
    other: int = 0
    frozen: int = 0

    @property
    def total(self) -> int:
        """All parameters."""
        return self.fp8 + self.other

    def __add__(self, other: Weights) -> Weights:
        """Return the weights of two groups together."""
        return Weights(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Bytes that one rank sends in one training step; ``all_reduce`` is between copies (HSDP)."""

    all_gather_forward: float
    all_gather_backward: float
    reduce_scatter: float
    all_reduce: float
    scales: float

    @property
    def total(self) -> float:
        """The sum of all collectives."""
        gathers = self.all_gather_forward + self.all_gather_backward
        return gathers + self.reduce_scatter + self.all_reduce + self.scales


def weights_of(
    model: nn.Module,
    fp8: Collection[str],
    *,
    blocks: Collection[str],
    shards: int,
    parts: Callable[[str], int] = lambda fqn: 1,
) -> dict[str, Weights]:
    """Return what each of the groups gathers, by fqn, with the padding of ``shards`` parts; the root is ``""``.

    Args:
        model: not sharded; it may be on the meta device.
        fp8: fqns of what is gathered as float8: layers with a weight, and Parameters of stacked experts.
        blocks: fqns of the modules that gather their own weights; one does not lie in another.
        shards: ranks per copy of the model.
        parts: into how many parts tensor parallelism cuts the parameter of an fqn; 1: it is whole on every rank.
    """
    found = dict.fromkeys(["", *blocks], Weights())
    coded = {*fp8, *(f"{fqn}.weight" for fqn in fp8)}
    for fqn, p in model.named_parameters():
        group = next((prefix for prefix in _prefixes(fqn) if prefix in found), "")
        size, is_coded = padded(p, shards) // parts(fqn), fqn in coded
        found[group] += Weights(
            fp8=size if is_coded else 0,
            fp8_weights=int(is_coded),
            other=0 if is_coded else size,
            frozen=0 if p.requires_grad else size,
        )
    return found


def _prefixes(fqn: str) -> Iterator[str]:
    """Yield ``a.b`` and ``a`` for ``a.b.c``."""
    while "." in fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


def padded(tensor: Tensor, shards: int) -> int:
    """Return the elements of ``shards`` equal parts of the first dimension that hold ``tensor``, (rows, ...)."""
    rows = tensor.shape[0] if tensor.ndim else 1
    return -(-rows // shards) * shards * (tensor.numel() // max(rows, 1))


def gathered(weights: Weights, param_dtype: torch.dtype) -> int:
    """Return the bytes of whole weights as FSDP2 gathers them: FP8 parameters take 1 byte each."""
    return weights.fp8 + weights.other * param_dtype.itemsize


def all_gather(size: float, ranks: int) -> float:
    """Return the bytes that a rank sends in a ring all-gather or reduce-scatter of ``size`` bytes in all."""
    return size * (ranks - 1) / ranks


def all_reduce(size: float, ranks: int) -> float:
    """Return the bytes that a rank sends in a ring all-reduce of ``size`` bytes on each rank."""
    return 2 * size * (ranks - 1) / ranks


def step(
    blocks: Weights,
    root: Weights,
    *,
    shards: int,
    copies: int = 1,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool | None = None,
    tensor_parallel: int = 1,
    fp8_reduce: bool = False,
) -> Volume:
    """Return the volume of one step of one micro-batch.

    Args:
        blocks: the weights that the groups below the root gather.
        root: the weights that the root gathers.
        shards: ranks per copy of the model.
        copies: copies of the model (``replicate``).
        param_dtype: the dtype in which weights are gathered that are not gathered as float8 (32-true: float32).
        reduce_dtype: the dtype in which gradients are reduced.
        reshard_after_forward: as in :class:`~lightning_lowprec.fsdp2.options.ShardOptions`, without sizes.
        tensor_parallel: ranks of a tensor-parallel group, over which the scales are reduced too.
        fp8_reduce: as in ``ShardOptions``.

    Raises:
        ValueError: ``shards`` or ``copies`` is below 1.
    """
    check_integer("shards", shards, least=1)
    check_integer("copies", copies, least=1)
    forward = gathered(blocks, param_dtype) + gathered(root, param_dtype)
    again = 0 if reshard_after_forward is False else gathered(blocks, param_dtype)
    again += gathered(root, param_dtype) if reshard_after_forward is True else 0
    trained = blocks.total - blocks.frozen + root.total - root.frozen
    within = BYTES_PER_VALUE if fp8_reduce and copies == 1 else reduce_dtype.itemsize
    between = BYTES_PER_VALUE if fp8_reduce else reduce_dtype.itemsize
    scales = 4 * (blocks.fp8_weights + root.fp8_weights)
    return Volume(
        all_gather_forward=all_gather(forward, shards),
        all_gather_backward=all_gather(again, shards),
        reduce_scatter=all_gather(trained * within, shards),
        all_reduce=all_reduce(trained * between / shards, copies),
        scales=all_reduce(scales, shards) + all_reduce(scales, tensor_parallel),
    )


def in_flight(
    block: Weights,
    root: Weights,
    *,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    codes: float = 0.0,
) -> int:
    """Return an upper bound of the bytes beside state and activations that a rank holds at once in a backward pass.

    The root's weights stay gathered, and its gradients wait for the last one. Meanwhile a block's gradients and their
    buffer exist, and the next block is gathered. At the end the root's weights are freed, and the root's gradients and
    their buffer exist.

    Args:
        block: the weights of the largest group below the root.
        root: the weights that the root gathers.
        param_dtype: as in :func:`step`.
        reduce_dtype: as in :func:`step`.
        codes: bytes per gradient of :func:`codes_in_flight`.
    """
    gradient = param_dtype.itemsize + reduce_dtype.itemsize + codes
    during: float = gathered(root, param_dtype) + (root.total - root.frozen) * param_dtype.itemsize
    during += gathered(block, param_dtype) + (block.total - block.frozen) * gradient
    return math.ceil(max(during, (root.total - root.frozen) * gradient))


def codes_in_flight(shards: int, copies: int) -> float:
    """Return the bytes per gradient that ``fp8_reduce`` needs at once: codes to send, and codes that arrived.

    Between copies, each copy also holds its part of the float32 sums, and the codes of that part.
    """
    both = 2 * BYTES_PER_VALUE
    return both if copies == 1 else (both + (torch.float32.itemsize + BYTES_PER_VALUE) / copies) / shards
