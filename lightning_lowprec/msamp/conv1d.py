"""transformers' ``Conv1D`` (GPT-2): the work of a Linear, with a weight that is stored as [in, out].

Importing this module imports transformers; import it where a ``Conv1D`` was found.
"""

from __future__ import annotations

from typing import final

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from lightning_lowprec.msamp.layer import ScaledLayer


@final
class ScaledConv1D(ScaledLayer, Conv1D):  # type: ignore[misc]
    """A Conv1D whose weight is kept as codes; still a ``Conv1D`` for transformers and PEFT."""

    in_by_out = True

    def _plain(self, input: Tensor, weight: Tensor) -> Tensor:
        product = input @ weight
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def __repr__(self) -> str:
        return f"ScaledConv1D(nf={self.out_features}, nx={self.in_features})"
