"""Find out whether the program has switched autocast off inside of a plugin's forward: it declares float32 there.

Outside of such a forward autocast is off without a declaration, as where a custom autograd Function computes its
forward again in the backward. So the forward leaves a mark, one per thread. Compiled code reads and guards one for all
threads.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn, final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Module

from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.private.torch import is_in_backward
from lightning_lowprec.private.torch_modules import TracedModule
from lightning_lowprec.products.transforms import FORWARD_MODE, PLAIN_FIRST, check_call

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


class PlainFirst(TracedModule):
    """Abstract: a layer of a backend, which refuses, by name of the way out, the tools that know torch's layers only.

    For ``torch.export`` its forward asks (``transforms.check_call``), ``torch.jit.trace`` calls ``_slow_forward``
    instead, and ``torch.jit.script`` calls ``__prepare_scriptable__``. Nothing of this runs in a step.
    """

    own_class: type[Module]

    def plain_forward(self, input: Tensor) -> Tensor:
        """Compute as the layer did before it was converted."""
        output: Tensor = self.own_class.forward(self, input)
        return output

    def declared_forward(self, input: Tensor) -> Tensor:
        """Compute in the dtype of the input, as the program declares.

        torch refuses a half-precision weight beside a float32 input.
        """
        half = input.dtype in HALF_DTYPES
        with torch.autocast(input.device.type, input.dtype if half else None, enabled=half):
            return self.plain_forward(input)

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            f"`torch.jit.script` does not fit {type(self).__name__}, a layer that a precision of lightning_lowprec has"
            f" converted. {PLAIN_FIRST}."
        )

    def check_trace(self) -> None:
        """Refuse ``torch.jit.trace`` where the layer computes in FP8."""
        if self.training or getattr(self, "fp8_eval", True):
            check_call(type(self).__name__)
