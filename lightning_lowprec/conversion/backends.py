"""Back to torch's own layers: what another precision left in a model that is set up again."""

from __future__ import annotations

import sys
from typing import Any, Literal

from torch import nn

Backend = Literal["torchao", "transformer_engine"]


def unconvert(model: nn.Module, *, but: Backend | None = None) -> None:
    """Undo the conversions of every backend except ``but``, in place; a backend that is not imported has done none."""
    torchao = _imported("torchao.linear")
    if torchao is not None and but != "torchao":
        torchao.revert(model)
    te = _imported("te.convert")
    if te is not None and but != "transformer_engine":
        te.revert(model)


def _imported(name: str) -> Any:
    return sys.modules.get(f"lightning_lowprec.{name}")
