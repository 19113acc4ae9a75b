"""Gradients of half-precision parameters under DDP, averaged over the ranks in float32.

DDP's buckets have the dtype of their parameters, and so has what it sums over ranks. A communication hook sums float32
instead. What a parameter's ``grad`` then is:

* only reduced in float32: the average rounded to the parameter's dtype, once, as DDP stores it. Micro-batches add up in
  half precision.
* accumulated too: float32. DDP refuses a ``grad`` of another dtype than the parameter's, so while a backward runs,
  ``grad`` is the gradient of this micro-batch alone, as autograd computed it, and the sum of the earlier ones waits
  aside. Where ranks synchronise, the hook adds it before it averages; within ``no_sync`` it is added afterwards.

An average of sums is a sum of averages, so synchronising after every micro-batch gives the same as after the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec.masters.casting import HALF_DTYPES


class Float32Reduction:
    """Registers itself as the communication hook of ``ddp``, which holds it.

    Args:
        ddp: its half-precision parameters must be cast already.
        accumulate: whether ``grad`` is float32 between backwards; then :meth:`during_backward` must be around each.

    Raises:
        RuntimeError: ``ddp`` has a communication hook already (torch's error).
    """

    def __init__(self, ddp: DistributedDataParallel, *, accumulate: bool) -> None:
        self.accumulate = accumulate
        self._group: Any = ddp.process_group
        self._unused_allowed = ddp.find_unused_parameters
        self.params = [p for p in ddp.module.parameters() if p.requires_grad and p.dtype in HALF_DTYPES]
        self._waiting: dict[int, Tensor] = {}  # by id(parameter): the float32 sum of earlier backwards
        self._averaged: dict[int, Tensor] = {}  # by id(parameter): what this backward's hooks computed
        self._in_backward = False
        if accumulate:
            for p in self.params:
                p.grad_dtype = p.dtype if p.grad is None else None  # None: any
        ddp.register_comm_hook(self, _reduce_bucket)

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a ``GradBucket`` over the ranks; half-precision ones as float32, with what waits for them."""
        buffer = bucket.buffer()
        if buffer.dtype not in HALF_DTYPES:
            return allreduce_hook(self._group, bucket)
        if buffer.is_sparse:
            raise RuntimeError(
                f"gradients of {buffer.dtype} parameters of shape {tuple(buffer.shape)} are sparse; DDP reduces only"
                " dense ones in float32. Use `sparse=False`, or `grad_reduce_dtype=None`."
            )
        if self.accumulate and not self._in_backward:
            raise RuntimeError(
                "`grad_accumulation_dtype=torch.float32` under DDP adds gradients after every backward, and this one"
                " did not go through the plugin: call `fabric.backward(loss)` in Fabric and"
                " `self.manual_backward(loss)` in a LightningModule, not `loss.backward()`."
            )
        total = buffer.float()
        if self.accumulate:
            self._complete(bucket, total)
        total.div_(dist.get_world_size(self._group))  # before the sum, as DDP does
        future: torch.futures.Future[Any] = dist.all_reduce(total, group=self._group, async_op=True).get_future()
        if self.accumulate:
            return future.then(lambda _: buffer)  # DDP gets its own values back: `total` has the result
        return future.then(lambda done: buffer.copy_(done.value()[0]))

    def _complete(self, bucket: Any, total: Tensor) -> None:
        start = bucket.buffer().storage_offset()
        for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            part = total.as_strided(view.shape, view.stride(), view.storage_offset() - start)
            waiting = self._waiting.get(id(param))
            if waiting is not None:
                self._waiting[id(param)] = part.add_(waiting)  # the other copy's memory goes back now
            self._averaged[id(param)] = part

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Around a backward: ``grad`` is float32 before and after it, half precision within."""
        for p in self.params:
            if p.grad is not None and p.grad.dtype == torch.float32:
                self._waiting[id(p)], p.grad = p.grad, None
            p.grad_dtype = p.dtype  # a product with a float32 tensor, say, would leave a float32 gradient otherwise
            if self._unused_allowed and id(p) in self._waiting:
                # DDP that looks for unused parameters insists on a gradient of those used since it last synchronised
                p.grad = torch.zeros_like(p, requires_grad=False)
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
            self._show_sums()

    @torch.no_grad()
    def _show_sums(self) -> None:
        for p in self.params:
            waiting, averaged = self._waiting.get(id(p)), self._averaged.get(id(p))
            if p.grad is None:  # unused in this backward: on every rank, where ranks synchronised
                total = waiting
            elif averaged is not None:
                total = averaged
            else:
                total = p.grad.float() if waiting is None else waiting.add_(p.grad)
            if total is not None:
                p.grad_dtype = None  # any
                p.grad = total
        self._waiting, self._averaged = {}, {}


def _reduce_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    return state.reduce(bucket)
