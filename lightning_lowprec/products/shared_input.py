"""Codes of an input that several layers read one after the other: query, key and value; gate and up.

The last input of each thread is remembered, weakly, with its codes. The next layer gets the same codes if it reads the
same tensor, and nothing has written to that tensor in between. A write in place through ``tensor.data`` is not seen.

The codes are forgotten with the next input, when the input dies, and when the backward of a layer has read them.
Compiled code does not use this module: the compiler finds equal expressions itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_lowprec.private.torch import current_dispatch_mode, version_of

Codes = tuple[Tensor, Tensor]
"""[M, K] float8 and its scale, [] float32."""
_thread = threading.local()


@final
class Entry:
    """The codes of one input, in ``slot``: the list of the last entry of a thread."""

    def __init__(self, slot: list[Entry], input: Tensor, key: tuple[Any, ...], codes: Codes) -> None:
        this, mode = weakref.ref(self), current_dispatch_mode()
        self.slot, self.key, self.codes = slot, key, codes
        self._input = weakref.ref(input, lambda _: forget(this))
        self._mode = None if mode is None else weakref.ref(mode)

    def is_of(self, input: Tensor, key: tuple[Any, ...]) -> bool:
        """Return whether the codes are those of ``input`` as it is now.

        A checkpoint that saves the results of some operations counts operations: it must see the same ones when it
        computes again. So codes are shared below one mode only.
        """
        mode = None if self._mode is None else self._mode()
        return self._input() is input and self.key == key and mode is current_dispatch_mode()


def forget(reference: weakref.ref[Entry]) -> None:
    """Forget an entry, from any thread, if no other has taken its place."""
    entry = reference()
    if entry is not None:
        entry.slot[:] = [other for other in entry.slot if other is not entry]


def codes_of(
    input: Tensor, how: tuple[Any, ...], encode: Callable[[], Codes]
) -> tuple[Tensor, Tensor, weakref.ref[Entry] | None]:
    """Return codes, their scale, and a reference to the entry that keeps them for the next layer, if one does.

    ``input`` is what the layer was called with; ``how`` is all else that determines the codes: dtype and kind of scale.
    """
    if not _may_be_shared(input):
        return *encode(), None
    slot: list[Entry] = vars(_thread).setdefault("slot", [])
    key = *how, *_state(input)
    entry = next(iter(slot), None)
    if entry is None or not entry.is_of(input, key):
        slot.clear()  # the memory of the old codes is free for the new ones
        del entry
        entry = Entry(slot, input, key, encode())
        slot.append(entry)
    return *entry.codes, weakref.ref(entry)


def _may_be_shared(input: Tensor) -> bool:
    """Return whether a change of ``input`` will be seen, and whether a backward may follow."""
    if not torch.is_grad_enabled() or input.is_inference():
        return False
    if type(input) not in (Tensor, nn.Parameter):
        return False
    # a captured graph is replayed with other values in the same memory
    return not (input.is_cuda and torch.cuda.is_current_stream_capturing())


def _state(input: Tensor) -> tuple[Any, ...]:
    """Return a value that changes when ``input`` is written to, and with the stream that computes."""
    stream = torch.cuda.current_stream(input.device) if input.is_cuda else None
    return version_of(input), input.data_ptr(), input.shape, input.stride(), stream
