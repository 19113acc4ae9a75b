"""transformers' ``Conv1D`` (GPT-2): the work of a Linear, with a weight that is stored as [in, out].

Importing this module imports Transformer Engine and transformers; import it where a ``Conv1D`` was found.
"""

from __future__ import annotations

from typing import final

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from lightning_lowprec.te.layer import TELayer


@final
class TEConv1D(TELayer, Conv1D):
    """A Conv1D with Transformer Engine's GEMMs; still a ``Conv1D`` for transformers and PEFT."""

    in_by_out = True

    def _plain(self, input: Tensor) -> Tensor:
        output: Tensor = Conv1D.forward(self, input)  # type: ignore[no-untyped-call]
        return output

    @property
    def reset_parameters(self) -> None:
        """A Conv1D has no such method, and Transformer Engine's is for weights of the other layout."""
        raise AttributeError("Conv1D has no `reset_parameters`")

    def __repr__(self) -> str:
        """Show the sizes, as Conv1D does."""
        return f"TEConv1D(nf={self.out_features}, nx={self.in_features})"
