"""transformers' ``Conv1D`` (GPT-2): the work of a Linear, with a weight that is stored as [in, out].

Importing this module imports torchao and transformers; import it where a ``Conv1D`` was found.
"""

from __future__ import annotations

from typing import final

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from lightning_lowprec.torchao.layer import FP8Layer


@final
class FP8Conv1D(FP8Layer, Conv1D):  # type: ignore[misc]
    """A Conv1D with FP8 GEMMs; still a ``Conv1D`` for transformers and PEFT."""

    in_by_out = True

    def _plain(self, input: Tensor) -> Tensor:
        output: Tensor = Conv1D.forward(self, input)  # type: ignore[no-untyped-call]
        return output

    def __repr__(self) -> str:
        """Show the sizes, as Conv1D does."""
        return f"FP8Conv1D(nf={self.out_features}, nx={self.in_features})"
