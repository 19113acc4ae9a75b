"""Bytes of Transformer Engine's own functions, which torch's dispatcher does not see.

Its layers call ``transformer_engine_torch`` (pybind11). Each function of that module is watched like an operation of
torch: the tensors that go in and come out count once each. A quantised tensor counts the codes that it holds.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from benchmarks.ledger.recorder import position

PARTS = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")
"""Where Transformer Engine's quantised tensors keep their codes."""
Seen = Callable[[str, int, int, int], None]
"""Called with name, first record, record after the last, bytes."""


def watch(seen: Seen) -> Callable[[], None]:
    """Call ``seen`` after each function of Transformer Engine that launched something; returns how to stop."""
    if find_spec("transformer_engine_torch") is None:
        return lambda: None
    import transformer_engine.pytorch  # noqa: F401  (loads the shared library that the next line needs)
    import transformer_engine_torch

    functions = {
        name: f for name, f in vars(transformer_engine_torch).items() if isinstance(f, types.BuiltinFunctionType)
    }

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            first = position()
            result = function(*args, **kwargs)
            last = position()
            if last > first:
                seen(name, first, last, sum(_sizes([args, kwargs, result])))
            return result

        return call

    replaced = {id(function): (function, watched(name, function)) for name, function in functions.items()}
    _replace(replaced)
    return lambda: _replace({id(new): (new, old) for old, new in replaced.values()})


def _replace(pairs: dict[int, tuple[Any, Any]]) -> None:
    """Replace the first function of each pair by the second, wherever Transformer Engine has imported the first."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine"):
            for key, value in list(vars(module).items()):
                if id(value) in pairs:
                    setattr(module, key, pairs[id(value)][1])


def _sizes(value: Any) -> list[int]:
    tensors = {tensor.data_ptr(): tensor for tensor in _tensors(value)}
    return [tensor.numel() * tensor.element_size() for tensor in tensors.values()]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield every plain tensor on the GPU inside lists, dictionaries and quantised tensors, without views of torch."""
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif codes := [part for name in PARTS if isinstance(part := getattr(value, name, None), Tensor)]:
        if getattr(value, "_transpose_invalid", False):
            codes = [part for part in codes if part is not getattr(value, "_transpose", None)]
        yield from codes
    elif isinstance(value, Tensor) and value.is_cuda:
        yield value
