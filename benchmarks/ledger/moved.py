"""Bytes that eager operations read and write, and the FLOPs of attention, by watching what torch dispatches.

An operation counts if a kernel, a copy or a fill was recorded while it ran; views and allocations cost nothing. An
operation reads each argument and writes each result once; those that read few rows of a large argument are listed.
Matrix products count their FLOPs from the null GPU's records, not here; attention counts by the shapes of its
arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ledger.recorder import position

FEW_ROWS_OF = {"embedding": 0, "nll_loss_forward": 0, "index": 0, "index_select": 0, "gather": 0}
"""Operations that read only as much of this argument as they write."""
NEVER_READ = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_")
"""In-place operations that do not read what they overwrite."""
PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_scaled_mm_v2",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "linear",
    "torchao::scaled_int8_mm",
    "lightning_lowprec::block_product",
)
ATTENTION = "scaled_dot_product"


@dataclass(frozen=True, slots=True)
class Operation:
    """One eager operation that launched something."""

    name: str
    """Of a product its format."""
    first: int
    """The index of the first record that it made."""
    last: int
    """The index after the last record that it made."""
    bytes: int
    """Read and written; 0 for matrix products and attention, whose bytes are not what limits them."""
    kind: str
    """elementwise, product or attention."""
    flops: int = 0
    """Of attention, and of products that no library's record counts."""


@dataclass
class Moved(TorchDispatchMode):
    """Watch operations; compiled graphs run as compiled, and operations that they call are seen too."""

    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def from_outside(self, name: str, first: int, last: int, moved: int) -> None:
        """Note a function that the dispatcher does not see, and forget torch's operations inside of it."""
        while self.operations and self.operations[-1].first >= first:
            self.operations.pop()
        product = "gemm" in name
        self.operations.append(
            Operation(name, first, last, 0 if product else moved, "product" if product else "elementwise")
        )

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run under this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = position()
        result = func(*args, **(kwargs or {}))
        last = position()
        if last > first:
            operation = _operation(func, args, kwargs or {}, result, first, last)
            inside = bool(self.operations) and self.operations[-1].first >= first  # `from_outside` has counted it
            self.operations.append(replace(operation, bytes=0) if inside else operation)
        return result


def _operation(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, first: int, last: int) -> Operation:
    name = func._schema.name.removeprefix("aten::")
    if ATTENTION in name:
        return Operation(name, first, last, 0, "attention", _attention_flops(func, args, kwargs))
    if name in PRODUCTS:
        return Operation(_format(args), first, last, 0, "product", _product_flops(args, result))
    return Operation(name, first, last, moved_bytes(func, args, kwargs, result), "elementwise")


def _attention_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return the FLOPs of an attention: two matrix products forward, five backward, half of each under a causal mask.

    query: (B, H, S, D), key: (B, heads of keys, T, D); heads of keys may be fewer than H.
    """
    given = {**dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)), **kwargs}
    batch, heads, rows, width = given["query"].shape
    products = 5 if "backward" in func._schema.name else 2
    flops: int = products * 2 * batch * heads * rows * given["key"].shape[-2] * width
    return flops // 2 if given.get("is_causal") else flops


def _format(args: Sequence[Any]) -> str:
    """Return the name of a product's format, if a kernel multiplies: the dtype of the first factor."""
    return str(_tensors(list(args))[0].dtype).removeprefix("torch.")


def _product_flops(args: Sequence[Any], result: Any) -> int:
    """Return 2 x rows x columns x the length that is summed over: the last dimension of the first factor."""
    factors = [tensor for tensor in _tensors(list(args)) if tensor.ndim >= 2]
    return 2 * result.numel() * factors[0].shape[-1] if factors else 0


def moved_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes on the device that an operation reads and writes, each tensor once for either."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    given = [*args, *(kwargs.get(a.name) for a in schema.arguments[len(args) :])]
    written = sum(_bytes(result_tensor) for result_tensor in _fresh(result, given))
    total = written
    for index, (argument, value) in enumerate(zip(schema.arguments, given, strict=False)):
        held = sum(_bytes(tensor) for tensor in _tensors(value))
        alias = argument.alias_info
        mutated = alias is not None and alias.is_write and not (argument.name == "grads" and name.startswith("_fused"))
        if FEW_ROWS_OF.get(name) == index:
            held = min(held, written)
        total += held * mutated + held * (not (mutated and (name in NEVER_READ or argument.is_out)))
    return total


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_cuda]


def _fresh(result: Any, given: Sequence[Any]) -> list[Tensor]:
    seen = {id(tensor) for tensor in _tensors(list(given))}
    return [tensor for tensor in _tensors(result) if id(tensor) not in seen]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes behind a tensor; an expanded dimension costs nothing."""
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        return sum(_bytes(getattr(tensor, name)) for name in _inner(tensor))
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.element_size()


def _inner(tensor: Tensor) -> Sequence[str]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return flatten()[0] if flatten else ()
