"""The dtypes in which gradients of half-precision weights are accumulated, and reduced over the ranks of DDP.

DDP sums gradients over the ranks in the dtype of their parameters. A communication hook sums in float32 instead. The
``grad`` of a parameter is then:

* with float32 reduction alone: the average, rounded once to the parameter's dtype. Micro-batches add up in half
  precision.
* with float32 accumulation: float32. DDP refuses a ``grad`` of another dtype than the parameter's, so during a backward
  ``grad`` is the half-precision gradient of the current micro-batch, and the float32 sum of the earlier micro-batches
  is stored elsewhere. Where ranks synchronise, the hook adds the stored sum before it averages; within ``no_sync`` the
  stored sum is added after the backward. (An average of sums is a sum of averages.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.references import WeakList


@final
class GradientDtypes:
    """The options ``grad_reduce_dtype`` and ``grad_accumulation_dtype``, each ``torch.float32`` or None."""

    def __init__(self, *, reduce: torch.dtype | None, accumulation: torch.dtype | None) -> None:
        self.reduce = reduce
        self.accumulation = accumulation
        self._reductions: WeakList[Float32Reduction] = WeakList()

    @property
    def reduces(self) -> bool:
        """Whether DDP needs our communication hook."""
        return self.reduce is not None or self.accumulation is not None

    @property
    def wraps_backward(self) -> bool:
        """Whether every backward must run within :meth:`during_backward`: for accumulation under DDP."""
        return self.accumulation is not None and bool(self._reductions)

    def prepare(self, params: Iterable[Tensor]) -> None:
        """Let autograd accumulate the gradients of half-precision parameters in float32, if that was chosen."""
        if self.accumulation is None:
            return
        under_ddp = {id(p) for reduction in self._reductions for p in reduction.params}
        for p in params:
            if p.dtype in HALF_DTYPES and id(p) not in under_ddp:
                grad, p.grad = p.grad, None  # torch refuses a gradient of another dtype
                p.grad_dtype = torch.float32
                p.grad = None if grad is None else grad.float()

    def reduce_ddp(self, module: Module) -> None:
        """Register our communication hook, if ``module`` is DDP and float32 was chosen."""
        if self.reduces and isinstance(module, DistributedDataParallel):
            self._reductions.add(Float32Reduction(module, accumulate=self.accumulation is not None))  # DDP keeps it

    def check_reduced(self) -> None:
        """Raise a RuntimeError if several processes train and no module was given to :meth:`reduce_ddp`."""
        distributed = dist.is_available() and dist.is_initialized()
        if self.reduces and distributed and dist.get_world_size() > 1 and not self._reductions:
            field = "grad_reduce_dtype" if self.reduce is not None else "grad_accumulation_dtype"
            raise RuntimeError(
                f"`{field}=torch.float32` needs to see the DDP module, and did not. In Fabric, `import"
                " lightning_lowprec` before the Fabric object is made, and set the model up with `fabric.setup`."
            )

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Run a backward within this context, if :attr:`wraps_backward`."""
        with ExitStack() as stack:
            for reduction in self._reductions if self.accumulation is not None else ():
                stack.enter_context(reduction.during_backward())
            yield

    def __repr__(self) -> str:
        return f"grad_reduce_dtype={self.reduce}, grad_accumulation_dtype={self.accumulation}"


@final
class Float32Reduction:
    """Average the gradients of a DDP module in float32, as its communication hook.

    The module's parameters are half precision already. With ``accumulate``, ``grad`` is float32 between backwards, and
    every backward must run within :meth:`during_backward`.
    """

    def __init__(self, ddp: DistributedDataParallel, *, accumulate: bool) -> None:
        self._accumulate = accumulate
        self._group: Any = ddp.process_group
        self._unused_allowed = ddp.find_unused_parameters
        self.params = [p for p in ddp.module.parameters() if p.requires_grad and p.dtype in HALF_DTYPES]
        self._earlier: dict[int, Tensor] = {}  # by id(parameter): the float32 sum of earlier backwards
        self._averaged: dict[int, Tensor] = {}  # by id(parameter): the averages that this backward's hooks computed
        self._in_backward = False
        if accumulate:
            for p in self.params:
                p.grad_dtype = p.dtype if p.grad is None else None  # None: any
        ddp.register_comm_hook(self, _reduce_bucket)

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a ``GradBucket`` over the ranks."""
        buffer = bucket.buffer()
        if buffer.dtype not in HALF_DTYPES:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            return allreduce_hook(self._group, bucket)
        if buffer.is_sparse:
            raise RuntimeError(
                f"gradients of {buffer.dtype} parameters of shape {tuple(buffer.shape)} are sparse; DDP reduces only"
                " dense gradients in float32. Use `sparse=False`, or `grad_reduce_dtype=None`."
            )
        if self._accumulate and not self._in_backward:
            raise RuntimeError(
                "`grad_accumulation_dtype=torch.float32` under DDP adds gradients after every backward, and this"
                " backward did not go through the plugin: call `fabric.backward(loss)` in Fabric and"
                " `self.manual_backward(loss)` in a LightningModule, not `loss.backward()`."
            )
        total = buffer.float()
        for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True) if self._accumulate else ():
            part = total.as_strided(view.shape, view.stride(), view.storage_offset() - buffer.storage_offset())
            if id(param) in self._earlier:
                self._earlier[id(param)] = part.add_(self._earlier[id(param)])  # frees the memory of the other copy
            self._averaged[id(param)] = part
        total.div_(dist.get_world_size(self._group))  # before the sum, as DDP does
        future: torch.futures.Future[Any] = dist.all_reduce(total, group=self._group, async_op=True).get_future()
        if self._accumulate:
            return future.then(lambda _: buffer)  # unchanged: `_show_sums` takes the result from `total`
        return future.then(lambda done: buffer.copy_(done.value()[0]))

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Make ``grad`` half precision during a backward; before and after it is float32."""
        for p in self.params:
            if p.grad is not None and p.grad.dtype == torch.float32:
                self._earlier[id(p)], p.grad = p.grad, None
            p.grad_dtype = p.dtype  # else a product with a float32 tensor would leave a float32 gradient
            if self._unused_allowed and id(p) in self._earlier:
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
            earlier, averaged = self._earlier.get(id(p)), self._averaged.get(id(p))
            if p.grad is None:  # unused in this backward: on every rank, where ranks synchronised
                total = earlier
            elif averaged is not None:
                total = averaged
            else:
                total = p.grad.float() if earlier is None else earlier.add_(p.grad)
            if total is not None:
                p.grad_dtype = None  # any
                p.grad = total
        self._earlier, self._averaged = {}, {}


def _reduce_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    return state.reduce(bucket)
