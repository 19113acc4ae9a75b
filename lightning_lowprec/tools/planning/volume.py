"""How many bytes a rank sends per training step under FSDP2, by formula.

With n shards, c copies, and P bytes in the wire dtype of some weights, ring collectives send per rank

    all-gather       (n - 1) / n * P          # once, and once more in backward where weights were freed
    reduce-scatter   (n - 1) / n * P          # P: the gradients, in the reduce dtype
    all-reduce       2 (c - 1) / c * P / n    # HSDP: the shards of gradients, over the copies
    scales           2 (n - 1) / n * 4 k      # one float32 per FP8 weight, all in one all-reduce

The root (embeddings, head, last norm) stays gathered between forward and backward unless ``reshard_after_forward`` is
True. Not counted: the padding of a dimension that does not divide by n, buffers, tensor parallelism, gradient
accumulation (each micro-batch gathers anew; gradients are reduced with each). Other algorithms than rings (NCCL's
trees) send other amounts for the same call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Parameters that are gathered together or alike, in numbers."""

    fp8: int = 0
    """Parameters that are gathered as float8."""
    fp8_weights: int = 0
    """In how many tensors; each has a scale."""
    other: int = 0
    """Parameters that are gathered in high precision."""
    frozen: int = 0
    """How many of all these do not train: gathered, but without gradients."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.fp8 + self.other


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Bytes that one rank sends in one training step."""

    all_gather_forward: float
    all_gather_backward: float
    reduce_scatter: float
    all_reduce: float
    """Between copies (HSDP)."""
    scales: float

    @property
    def total(self) -> float:
        """All of it."""
        gathers = self.all_gather_forward + self.all_gather_backward
        return gathers + self.reduce_scatter + self.all_reduce + self.scales


def gathered(weights: Weights, param_dtype: torch.dtype) -> int:
    """Bytes of whole weights as FSDP2 gathers them: 1 per FP8 parameter, the size of ``param_dtype`` for the others."""
    return weights.fp8 + weights.other * param_dtype.itemsize


def all_gather(size: float, ranks: int) -> float:
    """Bytes that a rank sends in a ring all-gather (or reduce-scatter) of ``size`` bytes in all."""
    return size * (ranks - 1) / ranks


def all_reduce(size: float, ranks: int) -> float:
    """Bytes that a rank sends in a ring all-reduce of ``size`` bytes on each rank."""
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
    """The volume of one step of one micro-batch.

    Args:
        blocks: what the groups below the root gather.
        root: what the root gathers.
        shards: ranks per copy of the model.
        copies: of the model (``replicate``).
        param_dtype: in which weights are gathered that are not gathered as float8 (32-true: float32).
        reduce_dtype: in which gradients are reduced.
        reshard_after_forward: as in :class:`~lightning_lowprec.fsdp2.options.ShardOptions`, without sizes.

    Raises:
        ValueError: ``shards`` or ``copies`` below 1.
    """
    for name, value in (("shards", shards), ("copies", copies)):
        if value < 1:
            raise ValueError(f"`{name}={value!r}` is not valid; expected an int of at least 1.")
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
