"""Back to torch's own layers: what another precision left in a model that is set up again."""

from __future__ import annotations

import sys
from typing import Any, Literal

from torch import nn

Backend = Literal["torchao", "transformer_engine"]


def unconvert(model: nn.Module, *, but: Backend | None = None) -> None:
    """Undo the conversions of every backend except ``but``, in place; a backend that is not imported has done none."""
    fusion = _imported("te.fusion")
    if fusion is not None and but != "transformer_engine":
        fusion.unfuse(model)
    torchao = _imported("torchao.linear")
    if torchao is not None and but != "torchao":
        torchao.revert(model)
    linear, norms = _imported("te.linear"), _imported("te.norms")
    if linear is not None and but != "transformer_engine":
        linear.revert_linears(model)
    if norms is not None and but != "transformer_engine":
        norms.revert_norms(model)
    recompute = _imported("te.recompute")
    if recompute is not None and but != "transformer_engine":
        recompute.checkpoint_by_te(model, wanted=False)


def _imported(name: str) -> Any:
    return sys.modules.get(f"lightning_lowprec.{name}")
