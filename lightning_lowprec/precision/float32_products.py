"""Watch the products of the first training forwards, and warn of large ones in float32 although autocast is on.

Autocast knows a list of operations. An operation that is not on the list, such as a grouped product, runs in the dtype
of its factors: float32, if a weight is float32. The first two training forwards after a set-up run under a
mode that sees every operation (:mod:`~lightning_lowprec.private.operations`); later forwards have no mode, no hook.
What else these forwards tell is in :mod:`~lightning_lowprec.precision.layer_calls`.

Not seen: code that ``torch.compile`` compiled, and kernels that are no operations of torch (Triton, Transformer
Engine). Not warned about: a product inside another ``torch.autocast``, whose dtype is the choice of the model, and a
product that this package computes, such as emulated FP8.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NamedTuple, final

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lightning_lowprec.precision.layer_calls import LayerCalls
from lightning_lowprec.private.operations import Operations, autocast_nesting

LARGE: Final = 0.01
"""The share of the matrix FLOPs of a forward from which float32 products are worth a warning: no gate reaches it."""


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


_NOT_CAST: Final[dict[str, Callable[..., int]]] = {
    "aten._grouped_mm": _product(0),
    "aten.addmm_": _product(1),
    "aten.baddbmm_": _product(1),
    "torch_nn._linear_cross_entropy_batch_chunked": _head,
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction": _head,
    "transformers.grouped_mm_fallback": _product(0),
}
"""The products that autocast leaves in the dtype of their factors, with formulas of their FLOPs."""
_KNOWN: Final[dict[str, Callable[..., int]]] = {
    **{f"aten.{name}": _product(0) for name in ("mm", "bmm", "_scaled_mm", "_scaled_grouped_mm", "_int_mm")},
    **{f"aten.{name}": _product(1) for name in ("addmm", "baddbmm")},
    "aten.convolution": _convolution,
    "aten.mkldnn_rnn_layer": _recurrent,
    "aten._cudnn_rnn": _recurrent,
    **{
        f"aten._scaled_dot_product_{name}": _attention
        for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    },
}
"""The other products, which count for the FLOPs of the forward: in float32 by request only."""


def _has_sizes(tensor: Tensor) -> bool:
    """Return whether a tensor has sizes that can be multiplied: not nested, not symbolic."""
    return not tensor.is_nested and all(isinstance(size, int) for size in tensor.shape)


class Place(NamedTuple):
    """Where a model multiplies in float32."""

    module: str
    op: str
    shapes: tuple[tuple[int, ...], ...]


@final
class Float32Products(Operations):
    """Count the matrix FLOPs of a forward, and those of float32 products that nobody chose.

    Args:
        models: the modules that may run.
        calls: notes which layers run, and which products run outside of converted layers.
    """

    def __init__(self, models: Sequence[Module], calls: LayerCalls | None = None) -> None:
        super().__init__()
        self.total = 0
        self.places: Counter[Place] = Counter()
        self._calls = calls or LayerCalls(models)
        self._nesting = autocast_nesting()

    @override
    def see(self, operation: Any, args: tuple[Any, ...], out: Any) -> None:
        """Count the FLOPs of a product."""
        name = str(operation.overloadpacket)
        not_cast = _NOT_CAST.get(name)
        formula = not_cast or _KNOWN.get(name)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        flops = 0 if formula is None or not all(map(_has_sizes, tensors)) else formula(args, out)
        module = self._calls.note(name, args, flops)
        self.total += flops
        float32 = any(tensor.dtype == torch.float32 for tensor in tensors)
        if flops and not_cast is not None and float32 and module is not None and autocast_nesting() == self._nesting:
            factors = tuple(tuple(tensor.shape) for tensor in tensors if tensor.is_floating_point())
            self.places[Place(module, name, factors)] += flops

    def message(self) -> str | None:
        """Return the warning; None if float32 products are a small share of the FLOPs."""
        flops = self.places.total()
        if flops == 0 or flops < LARGE * self.total:
            return None
        place, _ = self.places.most_common(1)[0]
        shapes = " x ".join(str(list(shape)) for shape in place.shapes)
        more = f" and {len(self.places) - 1} more" if len(self.places) > 1 else ""
        return (
            f"{place.module!r} multiplies in float32, by `{place.op}` ({shapes}){more}: {flops / self.total:.0%} of the"
            " matrix FLOPs of a training forward. Autocast does not know this operation and leaves its factors in"
            " float32. Cast them before the call (`x.to(torch.get_autocast_dtype(x.device.type))`, the weight too), or"
            " use a precision whose weights are half precision ('bf16-master', 'fp8-rowwise-master'). To keep float32"
            " without this warning, call the operation inside `torch.autocast(device_type, enabled=False)`."
        )


def watched(plugin: Any, autocast: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return ``autocast`` with a watch over a training forward; ``autocast`` alone if nothing trains.

    Args:
        plugin: the precision; its ``modules.watched_forwards`` counts down.
        autocast: the context of the forward.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # compiled code cannot be watched
        return autocast
    return _watch(plugin, autocast)


@contextmanager
def _watch(plugin: Any, autocast: AbstractContextManager[Any]) -> Iterator[None]:
    plugin.modules.watched_forwards -= 1
    calls = LayerCalls(plugin.modules.prepared)
    with autocast, Float32Products(plugin.modules.prepared, calls) as products:
        yield
    calls.report(plugin)
    if (message := products.message()) is not None:
        plugin.modules.watched_forwards = 0
        rank_zero_warn(f"`precision={plugin.precision!r}`: {message}")
