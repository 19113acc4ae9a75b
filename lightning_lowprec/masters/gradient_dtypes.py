"""In which dtype the gradients of half-precision weights are accumulated, and reduced over the ranks of DDP."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec.masters.casting import HALF_DTYPES
from lightning_lowprec.references import alive

if TYPE_CHECKING:  # needs torch.distributed, which some builds have not
    from lightning_lowprec.masters.ddp import Float32Reduction


class GradientDtypes:
    """The choice, and what carries it out: autograd's ``grad_dtype``, and under DDP a communication hook.

    Args:
        reduce: ``torch.float32``, or None for the dtype in which the gradients were accumulated.
        accumulation: ``torch.float32``, or None for the weights' dtype.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, *, reduce: torch.dtype | None, accumulation: torch.dtype | None) -> None:
        for field, value in (("grad_reduce_dtype", reduce), ("grad_accumulation_dtype", accumulation)):
            if value not in (None, torch.float32):
                raise ValueError(
                    f"`{field}={value!r}` is not valid; expected one of: None (the dtype of the weights),"
                    " torch.float32."
                )
        self.reduce = reduce
        self.accumulation = accumulation
        self._reductions: list[weakref.ref[Float32Reduction]] = []

    def check_no_masters(self) -> None:
        """Raise if something was asked for that float32 weights have already."""
        for field, value in (("grad_reduce_dtype", self.reduce), ("grad_accumulation_dtype", self.accumulation)):
            if value is not None:
                raise ValueError(
                    f"`{field}={value}` goes with `master_weights`, got `master_weights=False`: gradients of float32"
                    " weights are accumulated and reduced in float32 as it is. Leave it out, or set `master_weights`."
                )

    @property
    def reduces(self) -> bool:
        """Whether DDP needs our communication hook."""
        return self.reduce is not None or self.accumulation is not None

    @property
    def wraps_backward(self) -> bool:
        """Whether every backward must go through the plugin: accumulation under DDP."""
        return self.accumulation is not None and bool(alive(self._reductions))

    def prepare(self, params: Iterable[Tensor]) -> None:
        """Let autograd accumulate the gradients of half-precision parameters in float32, if asked to."""
        if self.accumulation is None:
            return
        under_ddp = {id(p) for reduction in alive(self._reductions) for p in reduction.params}
        for p in params:
            if p.dtype in HALF_DTYPES and id(p) not in under_ddp:
                grad, p.grad = p.grad, None  # torch refuses a gradient of another dtype
                p.grad_dtype = torch.float32
                p.grad = None if grad is None else grad.float()

    def reduce_ddp(self, module: Module) -> None:
        """Take over the reduction of a module, if it is DDP's and float32 was asked for."""
        if not self.reduces or not isinstance(module, DistributedDataParallel):
            return
        from lightning_lowprec.masters.ddp import Float32Reduction

        reduction = Float32Reduction(module, accumulate=self.accumulation is not None)  # held by DDP
        self._reductions = [weakref.ref(r) for r in (*alive(self._reductions), reduction)]

    def check_reduced(self) -> None:
        """Raise if several processes train and no module of theirs was seen.

        Raises:
            RuntimeError: nobody called :meth:`reduce_ddp`.
        """
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.reduces and distributed and torch.distributed.get_world_size() > 1 and not alive(self._reductions):
            field = "grad_reduce_dtype" if self.reduce is not None else "grad_accumulation_dtype"
            raise RuntimeError(
                f"`{field}=torch.float32` needs to see the DDP module, and did not. In Fabric, `import"
                " lightning_lowprec` before it is made and set the model up with `fabric.setup`."
            )

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Around every backward."""
        with ExitStack() as stack:
            if self.accumulation is not None:
                for reduction in alive(self._reductions):
                    stack.enter_context(reduction.during_backward())
            yield

    def __repr__(self) -> str:
        """Both dtypes."""
        return f"grad_reduce_dtype={self.reduce}, grad_accumulation_dtype={self.accumulation}"

    def __getstate__(self) -> dict[str, object]:
        """Modules stay in their process."""
        return {**self.__dict__, "_reductions": []}
