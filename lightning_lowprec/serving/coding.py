"""Round one weight for a format, some rows at a time, by the arithmetic that the run trained with.

    trained with      format with a scale per row     format with a scale per 128 x 128
    one scale         the same codes: every row or block has the weight's scale
    scale per row     the same codes                  other codes
    scale per block   other codes                     the same codes

Other codes have the run's arithmetic with the format's amax; how far their values lie from those that the run
multiplied by is noted in a :class:`Tally`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.weight_rounding import (
    BLOCK,
    ScalePer,
    WeightRounding,
    amax_grid,
    codes,
    nearest_scale,
    spread,
)

Rows = Callable[[int, int], Tensor]
"""Returns ``weight[start:stop]``."""
_ELEMENTS: Final = 1 << 23  # rounded at a time: 32 MB of float32


@final
@dataclass
class Tally:
    """What happened to the weights that became codes."""

    same: int = 0
    """Weights whose codes are those of the last step."""
    other: int = 0
    """Weights with other codes, because the format needs other scales."""
    new: int = 0
    """Weights that no forward rounded before."""
    signal: float = 0.0
    noise: float = 0.0
    """Squares of the trained values of ``other``, and of the differences of the stored ones."""

    @property
    def second_rounding(self) -> float | None:
        """The signal-to-noise ratio of other codes against those of the last step, dB; None: there are none."""
        if not self.other:
            return None
        return math.inf if self.noise == 0 else 10 * math.log10(self.signal / self.noise)


def step_of(shape: tuple[int, ...]) -> int:
    """Return how many rows of a tensor are handled at a time: a multiple of a block's rows."""
    width = max(1, math.prod(shape[1:]))
    return max(BLOCK, _ELEMENTS // width // BLOCK * BLOCK)


def largest(rows: Rows, shape: tuple[int, ...]) -> Tensor:
    """Return the largest absolute value of a tensor of any dimensions: [1, 1] float32."""
    found = [rows(at, min(at + step_of(shape), shape[0])).abs().amax() for at in _starts(shape)]
    return torch.stack(found).amax().float().reshape(1, 1)


def coded(
    rows: Rows,
    shape: tuple[int, int],
    scale_per: ScalePer,
    rounding: WeightRounding | None,
    amax: Tensor | None,
    tally: Tally,
    *,
    checks: bool,
) -> Iterator[tuple[Literal["codes", "scales"], Tensor]]:
    """Yield the codes and the reciprocal scales of a weight, some rows at a time.

    Args:
        rows: the weight, [N, K].
        shape: N and K.
        scale_per: ``"row"`` or ``"block"``, of the format.
        rounding: of the forward; None: the weight had none.
        amax: [1, 1], of the whole weight, if the rounding has one scale.
        tally: is filled.
        checks: whether values are checked, for which the device is waited for.

    Raises:
        ValueError: a value is NaN or inf (``checks``).
    """
    same = rounding is not None and rounding.scale_per in ("tensor", scale_per)
    for start in _starts(shape):
        values = rows(start, min(start + step_of(shape), shape[0]))
        own = amax_grid(values, scale_per)
        if checks and bool(own.isfinite().logical_not().any()):
            raise ValueError("it holds NaN or inf")
        if rounding is None:
            grid = nearest_scale(own)
        elif rounding.scale_per == "tensor":
            assert amax is not None
            grid = rounding.scale_of(amax).expand(own.shape)
        else:
            grid = rounding.scale_of(own)
        stored = codes(values, grid)
        inverse = grid.reciprocal()
        if checks and rounding is not None and not same:
            _compare(values, stored, inverse, rounding, tally)
        yield "codes", stored
        yield "scales", inverse
    tally.same += same
    tally.new += rounding is None
    tally.other += rounding is not None and not same


def _compare(values: Tensor, stored: Tensor, inverse: Tensor, rounding: WeightRounding, tally: Tally) -> None:
    grid = rounding.scale_of(amax_grid(values, rounding.scale_per))
    trained = codes(values, grid).float() * spread(grid.reciprocal(), values.shape)
    served = stored.float() * spread(inverse, values.shape)
    tally.signal += trained.square().sum(dtype=torch.float64).item()
    tally.noise += (served - trained).square().sum(dtype=torch.float64).item()


def _starts(shape: tuple[int, ...]) -> range:
    return range(0, shape[0], step_of(shape))
