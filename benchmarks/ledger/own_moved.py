"""Bytes of this package's own Triton kernels, which neither inductor nor torch's dispatcher sees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.ledger.recorder import position
from lightning_lowprec.masters import one_pass

GRADIENT = 2
"""The place of the gradient among the tensors of a row, which is read only."""


def watch(seen: Callable[[str, int, int, int], None]) -> Callable[[], None]:
    """Call ``seen`` after each launch with name, first record, record after the last, bytes; returns how to stop."""
    original = one_pass.launch

    @functools.wraps(original)
    def launch(rows: Sequence[one_pass.Row], *args: Any) -> None:
        first = position()
        original(rows, *args)
        seen("step_parameters", first, position(), sum(map(moved, rows)))

    one_pass.launch = launch
    return lambda: setattr(one_pass, "launch", original)


def moved(row: one_pass.Row) -> int:
    """Return the bytes that a step of one parameter reads and writes."""
    total = 0
    for place, tensor in enumerate(row.tensors):
        if tensor is not None:
            only_written = place == 0 and row.variant.form == "fp32"
            total += tensor.numel() * tensor.element_size() * (1 if only_written or place == GRADIENT else 2)
    return total
