"""See every operation that torch runs, with the dtypes after autocast; `torch.py` has the list of these names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode, ABC):  # type: ignore[no-untyped-call]
    """A context in which ``see`` is called after every operation, except those in code that ``torch.compile`` made."""

    supports_higher_order_operators = True
    """Let checkpoints in compiled code run operations that hold functions; torch refuses them under other modes."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` compile, which it otherwise does not do under a mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        out = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload):
            self.see(func, args, out)
        return out

    @abstractmethod
    def see(self, operation: Any, args: tuple[Any, ...], out: Any) -> None:
        """Look at an operation that has run.

        Args:
            operation: the overload: ``torch.ops.aten.mm.default``.
            args: its arguments, without those that are given by keyword alone.
            out: its result.
        """


def autocast_nesting() -> int:
    """Return how many ``torch.autocast`` are open, off or on; inside an operation, autocast itself looks like off."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
