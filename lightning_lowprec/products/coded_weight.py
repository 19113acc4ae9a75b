"""What a tensor tells the products of a layer if it holds codes in place of values."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor


class CodedWeight:
    """Base of tensors that appear to have values, and hold float8 codes with one scale, e.g. after an all-gather."""

    __slots__ = ()

    @abstractmethod
    def codes_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return the codes, in the layout of the weight, and their scale, [] float32."""
