"""Watch the products of the first two training forwards after a set-up; later forwards have no mode, no hook.

What they tell is in :mod:`~lightning_lowprec.precision.layer_calls`. The mode
(:class:`~lightning_lowprec.private.torch_products.Operations`) sees every operation, except code that ``torch.compile``
compiled, and kernels that are no operations of torch (Triton, Transformer Engine). The frames of Python tell which
module runs: hooks would make compiled code compile again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lightning_lowprec.precision.layer_calls import LayerCalls
from lightning_lowprec.private.torch_modules import is_compiled
from lightning_lowprec.private.torch_products import Operations


def _product(first: int) -> Callable[..., int]:
    """Return a formula for an operation whose factors are its arguments ``first`` and ``first + 1``."""
    return lambda args, out: 2 * int(out.numel() * args[first].shape[-1])


def _head(args: Any, out: Any) -> int:
    """[T, K] and [V, K]: the logits."""
    return 2 * int(args[0].numel() * args[1].shape[0])


def _attention(args: Any, out: Any) -> int:
    """[..., S, D], [..., T, D], [..., T, V]: scores and their product with the values, without a mask."""
    query, key, value = args[:3]
    return 2 * int(math.prod(query.shape[:-1]) * key.shape[-2] * (key.shape[-1] + value.shape[-1]))


def _convolution(args: Any, out: Any) -> int:
    """One product of a filter per output, of a transposed convolution per input."""
    size = (args[0] if args[6] else out).numel()
    return 2 * int(size * math.prod(args[1].shape[1:]))


def _recurrent(args: Any, out: Any) -> int:
    """[T, B, K] and the weights of one layer on CPU, or of all layers as a list on CUDA: each step, each weight."""
    steps = args[0].shape[0] * args[0].shape[1]
    weights = args[1] if isinstance(args[1], list | tuple) else args[1:3]
    return 2 * int(steps * sum(w.numel() for w in weights if w.ndim == 2))


_FLOPS: Final[dict[str, Callable[..., int]]] = {
    **{
        f"aten.{name}": _product(0)
        for name in ("mm", "bmm", "_scaled_mm", "_scaled_grouped_mm", "_int_mm", "_grouped_mm")
    },
    **{f"aten.{name}": _product(1) for name in ("addmm", "addmm_", "baddbmm", "baddbmm_")},
    "aten.convolution": _convolution,
    "aten.mkldnn_rnn_layer": _recurrent,
    "aten._cudnn_rnn": _recurrent,
    **{
        f"aten._scaled_dot_product_{name}": _attention
        for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    },
    "torch_nn._linear_cross_entropy_batch_chunked": _head,
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction": _head,
    "transformers.grouped_mm_fallback": _product(0),
}
"""The products, with formulas of their FLOPs."""


@final
class WatchedForward(Operations):
    """Tell ``calls`` of every operation: the module that runs it, and the FLOPs of a product."""

    def __init__(self, calls: LayerCalls) -> None:
        super().__init__()
        self._calls = calls
        self._running = RunningModules(calls.models, calls.layers, calls.compiled)

    @override
    def see(self, operation: Any, args: tuple[Any, ...], out: Any) -> None:
        name = str(operation.overloadpacket)
        formula = _FLOPS.get(name)
        known = formula is not None and all(_has_sizes(arg) for arg in args if isinstance(arg, Tensor))
        module, is_ours = self._running.innermost()
        self._calls.note(name, args, formula(args, out) if known and formula is not None else 0, module, is_ours)


def _has_sizes(tensor: Tensor) -> bool:
    """Return whether a tensor has sizes that can be multiplied: not nested, not symbolic."""
    return not tensor.is_nested and all(isinstance(size, int) for size in tensor.shape)


def watched(plugin: Any, autocast: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return ``autocast`` with a watch over a training forward; ``autocast`` alone if nothing trains or converts."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # compiled code cannot be watched
        return autocast
    return _watch(plugin, autocast)


@contextmanager
def _watch(plugin: Any, autocast: AbstractContextManager[Any]) -> Iterator[None]:
    plugin.modules.watched_forwards -= 1
    calls = LayerCalls(plugin.modules.prepared)
    with autocast, WatchedForward(calls):
        yield
    calls.report(plugin)


# ---- the module that runs an operation

_OURS: Final = __name__.partition(".")[0] + "."
_WATCHES: Final = (__name__, Operations.__module__)
_DISABLED: Final = "torch._dynamo.eval_frame"
_CALLS: Final = ("forward", "_call_impl")
_COMPILED: Final = ("torch._inductor.", "torch._functorch.", "torch.fx.")
"""Modules whose frames lie between an operation of compiled code and the module that was compiled."""


@final
class RunningModules:
    """The modules of some models, by id.

    Args:
        models: the models.
        layers: the ids of converted layers, of which only calls count: they also encode weights outside of them.
        compiled: filled with the ids of modules that are compiled: which modules they call is not seen.
    """

    def __init__(self, models: Iterable[Module], layers: Collection[int], compiled: set[int]) -> None:
        self._layers = layers
        modules = [module for model in models for module in model.modules()]
        self._ids = set(map(id, modules))
        self._compiled = compiled
        compiled.update(id(module) for module in modules if is_compiled(module))

    def innermost(self) -> tuple[int | None, bool]:
        """Return the id of the innermost module that runs, and whether this package computes the operation."""
        frame: Any = inspect.currentframe()
        ours, in_compiled, inner = False, False, ""
        while frame is not None:
            where = str(frame.f_globals.get("__name__"))
            if where in _WATCHES:
                frame = frame.f_back
                continue
            ours |= where.startswith(_OURS)
            module = self._module_of(frame)
            if module is not None and (in_compiled or inner == _DISABLED):  # what the compiler made is called by it
                self._compiled.add(module)
                return None, False
            if module is not None:
                return module, ours
            in_compiled |= where.startswith(_COMPILED) or frame.f_code.co_name.startswith("torch_dynamo_resume")
            frame, inner = frame.f_back, where
        return None, ours

    def _module_of(self, frame: Any) -> int | None:
        """Return the id of the module of which the frame is a method."""
        code = frame.f_code
        if not code.co_argcount or code.co_varnames[0] != "self":
            return None
        key = id(frame.f_locals.get("self"))
        if key not in self._ids or (key in self._layers and code.co_name not in _CALLS):
            return None
        return key
