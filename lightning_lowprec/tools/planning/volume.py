"""Bytes that a rank sends per training step under FSDP2, by formula.

With n shards, c copies, and P bytes of some weights in the dtype in which they are sent, ring collectives send per rank

    all-gather       (n - 1) / n * P          # in forward, and again in backward where weights were freed
    reduce-scatter   (n - 1) / n * P          # P: the gradients, in the reduce dtype
    all-reduce       2 (c - 1) / c * P / n    # HSDP: the shards of gradients, over the copies
    scales           2 (n - 1) / n * 4 k      # one float32 per FP8 weight, all k in one all-reduce

The root (embeddings, head, last norm) stays gathered between forward and backward unless ``reshard_after_forward`` is
True. Not counted: the padding of a dimension that n does not divide, buffers, tensor parallelism, gradient accumulation
(each micro-batch gathers and reduces again). Algorithms other than rings, such as NCCL's trees, send other amounts for
the same call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_lowprec.checks import check_integer


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

    Raises:
        ValueError: ``shards`` or ``copies`` is below 1.
    """
    check_integer("shards", shards, least=1)
    check_integer("copies", copies, least=1)
    forward = gathered(blocks, param_dtype) + gathered(root, param_dtype)
    again = 0 if reshard_after_forward is False else gathered(blocks, param_dtype)
    again += gathered(root, param_dtype) if reshard_after_forward is True else 0
    trained = blocks.total - blocks.frozen + root.total - root.frozen
    gradients = trained * reduce_dtype.itemsize
    return Volume(
        all_gather_forward=all_gather(forward, shards),
        all_gather_backward=all_gather(again, shards),
        reduce_scatter=all_gather(gradients, shards),
        all_reduce=all_reduce(gradients / shards, copies),
        scales=all_reduce(4 * (blocks.fp8_weights + root.fp8_weights), shards),
    )
