"""transformers' ``Conv1D`` (GPT-2): the work of a Linear, with a weight that is stored as [in, out].

Importing this module imports torchao and transformers; import it where a ``Conv1D`` was found.
"""

from __future__ import annotations

from typing import final

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from lightning_lowprec.torchao.layer import CodedLayer


@final
class CodedConv1D(CodedLayer, Conv1D):  # type: ignore[misc]
    """A Conv1D whose products run on codes; still a ``Conv1D`` for transformers and PEFT."""

    def _plain(self, input: Tensor) -> Tensor:
        output: Tensor = Conv1D.forward(self, input)  # type: ignore[no-untyped-call]
        return output

    def __repr__(self) -> str:
        """Show the sizes, as Conv1D does."""
        return f"CodedConv1D(nf={self.out_features}, nx={self.in_features})"
