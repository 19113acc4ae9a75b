"""Count what one step of FSDP2 sends, and the kernels and bytes of the code around its collectives.

with counted() as counts:
    step()
counts.sent("all_gather"), counts.kernels["copy in"]

A step has stages. The stage of an operation is the innermost of these functions that runs:

    scales      GatherScales.refresh            the scales of all weights that are gathered as float8
    copy in     FSDPParamGroup.unshard          codes or casts of the shards, and the buffer that is sent
    copy out    FSDPParamGroup.wait_for_unshard the buffer that arrived becomes whole weights
    reduce      FSDPParamGroup.post_backward    gradients become one buffer, and the result becomes gradients of shards
    else        everything else

Collectives are seen by torch's dispatcher, kernels by the null GPU. Bytes of operations are what their tensors hold:
each argument is read or written once, each new result is written once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.ledger.recorder import Log, Record, mark, recording
from lightning_lowprec.fsdp2.fp8_gather import GatherScales
from lightning_lowprec.numerics import one_pass
from lightning_lowprec.tools.planning.costs import all_gather, all_reduce

STAGES = {
    "scales": (GatherScales, "refresh"),
    "copy in": (FSDPParamGroup, "unshard"),
    "copy out": (FSDPParamGroup, "wait_for_unshard"),
    "reduce": (FSDPParamGroup, "post_backward"),
}
KINDS = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
}
"""Collectives of torch's two dispatched libraries, ``c10d`` and ``_c10d_functional``."""
WIRE = "wire"
"""The stage of the fake group's own copies, which no GPU makes."""
NO_TRAFFIC = ("aten.empty", "aten.new_empty", "aten.resize_", "aten.set_", "aten.record_stream", "aten.is_")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One call of a collective."""

    stage: str
    kind: str
    """all_gather, reduce_scatter or all_reduce."""
    dtype: str
    size: int
    """Bytes of the whole: what an all-gather returns, what others take or change."""
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes that this rank sends in a ring."""
        ring = all_reduce if self.kind == "all_reduce" else all_gather
        return ring(self.size, self.ranks)


@dataclass
class Counts:
    """What one step did; filled when the step has ended."""

    collectives: list[Collective] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    """How often each stage ran."""
    moved: Counter[str] = field(default_factory=Counter)
    """Bytes that the operations of each stage read and wrote."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Kernels of each stage."""
    waits: Counter[str] = field(default_factory=Counter)
    """How often the host waits for the GPU in each stage."""

    def sent(self, kind: str, *stages: str) -> float:
        """Return the bytes that this rank sent in collectives of a kind, of all stages or of some."""
        return sum(c.sent for c in self.collectives if c.kind == kind and (not stages or c.stage in stages))

    def dtypes(self, kind: str, *stages: str) -> list[str]:
        """Return the dtypes of the collectives of a kind."""
        return sorted({c.dtype for c in self.collectives if c.kind == kind and (not stages or c.stage in stages)})


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what the body does. The body runs on the null GPU; not nested."""
    counts = Counts()
    stage = _Stage(counts)
    with ExitStack() as stack:
        for name, (owner, method) in STAGES.items():
            stack.enter_context(patch.object(owner, method, _staged(getattr(owner, method), stage, name)))
        for name in ("_compiled", "_compiled_into"):
            stack.enter_context(patch.object(one_pass, name, _counting(getattr(one_pass, name), counts, stage)))
        log = stack.enter_context(recording())
        stack.enter_context(_Seen(counts, stage))
        yield counts
    counts.kernels = _by_stage(log, lambda record: record.what in ("kernel", "gemm"))
    counts.waits = _by_stage(log, lambda record: record.waits)


@final
class _Stage:
    """The stage that runs now."""

    def __init__(self, counts: Counts) -> None:
        self.name = "else"
        self._counts = counts

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        outer, self.name = self.name, name
        self._counts.calls[name] += 1
        mark(name)
        try:
            yield
        finally:
            self.name = outer
            mark(outer)


def _staged(method: Callable[..., Any], stage: _Stage, name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def staged(*args: Any, **kwargs: Any) -> Any:
        with stage.entered(name):
            return method(*args, **kwargs)

    return staged


def _counting(compiled: Callable[..., Any], counts: Counts, stage: _Stage) -> Callable[..., Any]:
    """Count the bytes of functions that run as one compiled kernel, which no dispatcher sees."""

    def for_function(function: Callable[..., Tensor]) -> Callable[..., Any]:
        run = compiled(function)

        def call(*args: Any) -> Any:
            out = run(*args)
            flat = [part for part in (*args, out) if isinstance(part, Tensor) and part.ndim]
            counts.moved[stage.name] += _bytes(flat)  # values, and codes that are an argument or the result
            return out

        return call

    return for_function


def _by_stage(log: Log, counts: Callable[[Record], bool]) -> Counter[str]:
    """Return the number of records behind each mark."""
    stage, found = "else", Counter[str]()
    for record in log.records:
        if record.what == "mark":
            stage = record.name
        elif stage != WIRE and counts(record):
            found[stage] += 1
    return found


@final
class _Seen(TorchDispatchMode):
    """See every operation on plain tensors; those of tensor subclasses come back as operations on plain ones."""

    def __init__(self, counts: Counts, stage: _Stage) -> None:
        super().__init__()
        self._counts = counts
        self._stage = stage

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as compiled; under other modes torch runs it eagerly."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented
        kind = KINDS.get(func._opname) if func.namespace in ("c10d", "_c10d_functional") else None
        if kind is None:
            out = func(*args, **kwargs)
            self._counts.moved[self._stage.name] += _traffic(func, args, kwargs, out)
            return out
        self._counts.collectives.append(self._collective(kind, func, args))
        with self._stage.entered(WIRE):
            return func(*args, **kwargs)

    def _collective(self, kind: str, func: Any, args: Any) -> Collective:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        ranks = _ranks(args)
        size = max(t.numel() * t.element_size() for t in tensors)
        if func._opname == "all_gather_into_tensor":  # has the shard alone among its arguments
            size *= ranks
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        return Collective(stage=self._stage.name, kind=kind, dtype=dtype, size=size, ranks=ranks)


def _ranks(args: Any) -> int:
    """Return the size of the process group among a collective's arguments."""
    for argument in reversed(tree_leaves(args)):
        if isinstance(argument, torch.ScriptObject):
            if "ProcessGroup" in str(argument._type()):
                return dist.ProcessGroup.unbox(argument).size()
        elif isinstance(argument, str) and argument not in ("sum", "avg", "max", "min"):
            return dist.distributed_c10d._resolve_process_group(argument).size()
    raise TypeError(f"no process group among {args}")


def _traffic(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    name = f"{func.namespace}.{func._opname}"
    if func.is_view or name.startswith(NO_TRAFFIC):
        return 0
    if name == "fsdp.all_gather_copy_in":  # writes its part of the buffer that the second argument is
        return 2 * _bytes(args[0])
    return _bytes((args, kwargs)) + _bytes(out)


def _bytes(tree: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, Tensor))
