"""Bytes of this package's own Triton kernels, which neither inductor nor torch's dispatcher sees.

`multiply` counts as nothing: it looks at a number first, and a loss's gradient mostly begins with 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from benchmarks.ledger.recorder import position
from benchmarks.ledger.triton_bytes import of_codes
from lightning_lowprec.masters import kernel_step
from lightning_lowprec.numerics import fp8_matrices, linear_cross_entropy

Seen = Callable[[str, int, int, int], None]
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of a number of a gradient, by the kernel's words for dtypes; a gradient is read only."""


def watch(seen: Seen) -> Callable[[], None]:
    """Call ``seen`` after each launch with name, first record, record after the last, bytes; returns how to stop."""
    stops = [
        _watch(kernel_step, "step_parameters", lambda rows, *_: sum(map(of_a_step, rows)), seen),
        _watch(fp8_matrices, "encode_weight", lambda w, hint, _: of_codes(w, "encode", hint is None), seen),
        _watch(linear_cross_entropy, "multiply", lambda *_: 0, seen),
    ]

    def stop_all() -> None:
        for stop in stops:
            stop()

    return stop_all


def _watch(module: ModuleType, name: str, size: Callable[..., int], seen: Seen) -> Callable[[], None]:
    original = module.launch

    @functools.wraps(original)
    def launch(*args: Any) -> Any:
        first = position()
        result = original(*args)
        if position() > first:  # else nothing is recorded
            seen(name, first, position(), size(*args))
        return result

    module.launch = launch  # type: ignore[attr-defined]
    return lambda: setattr(module, "launch", original)


def of_a_step(row: kernel_step.Row) -> int:
    """Return the bytes that a step of one parameter reads and writes."""
    total = row.param.numel() * BYTES[row.variant.grad]
    for place, tensor in enumerate(row.tensors):
        if tensor is not None:
            only_written = place == 0 and row.variant.form == "fp32"
            total += tensor.numel() * tensor.element_size() * (1 if only_written else 2)
    return total
