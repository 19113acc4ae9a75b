"""Find out whether the program has switched autocast off inside of a plugin's forward: it declares float32 there.

Outside of such a forward autocast is off without a declaration, as where a custom autograd Function computes its
forward again in the backward. So the forward leaves a mark, one per thread. Compiled code reads and guards one for all
threads.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final
from weakref import WeakSet

import torch
from torch.nn import Module

from lightning_lowprec.private.torch import is_in_backward
from lightning_lowprec.products.transforms import FORWARD_MODE

_MIXED: Final = re.compile("dtype|scalar type|same type")
"""What torch says of an operation that gets two dtypes."""


@final
class _Thread(threading.local):
    inside = False


_thread = _Thread()
_inside = False
_declared: WeakSet[Module] = WeakSet()  # the layers whose last forward was declared: a checkpoint runs them again


@contextmanager
def forward(device_type: str, dtype: torch.dtype, *, cache: bool, half_weights: str | None = None) -> Iterator[None]:
    """Enter autocast, and mark the forward of a plugin; ``half_weights`` explains an operation that gets two dtypes."""
    global _inside
    before, _thread.inside, _inside = (_thread.inside, _inside), True, True
    try:
        with torch.autocast(device_type, dtype, cache_enabled=cache):
            yield
    except RuntimeError as error:
        if "jvp function" in str(error):  # torch's words where a layer's autograd Function has no forward mode
            raise RuntimeError(FORWARD_MODE) from error
        if half_weights is None or half_weights in str(error) or _MIXED.search(str(error)) is None:
            raise
        raise RuntimeError(f"{error}. {half_weights}") from error
    finally:
        _thread.inside, _inside = before


def is_declared(layer: Module) -> bool:
    """Return whether a layer that finds autocast off shall compute as the program declares: in its input's dtype."""
    if torch.compiler.is_compiling():
        return _inside
    if not is_in_backward():
        (_declared.add if _thread.inside else _declared.discard)(layer)
    return layer in _declared
