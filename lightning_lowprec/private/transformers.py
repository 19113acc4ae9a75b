"""Private names of transformers (4.57 to 5) that this package uses. transformers is imported inside the functions."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Final

from torch import Tensor

from lightning_lowprec.extras import INSTALL
from lightning_lowprec.private.names import missing

CHECKPOINT_FUNCTION: Final = "_gradient_checkpointing_func"
"""Where a module keeps its checkpoint function (since 4.35) after ``gradient_checkpointing_enable()``."""
_NAMES: Final = (
    f"transformers.modeling_utils.PreTrainedModel().{CHECKPOINT_FUNCTION}",
    "transformers.models.mixtral.modeling_mixtral.MixtralExperts._apply_gate",
)


def moved() -> list[str]:
    """Return the private names that the installed transformers no longer has; [] without transformers."""
    return [] if find_spec("transformers") is None else missing(_NAMES)


def check_experts(experts: Any) -> None:
    """Raise ImportError if stacked experts have no method for the activation between their two GEMMs."""
    if not hasattr(experts, "_apply_gate"):
        raise ImportError(
            f"transformers {version('transformers')} has no `_apply_gate` in {type(experts).__name__} (used by"
            f" `fuse='auto'`). Install a version that has: `{INSTALL['transformers']}`.",
            name="transformers",
        )


def activate(experts: Any, doubled: Tensor) -> Tensor:
    """Apply the activation of stacked experts to the output of their first GEMM: [P, 2I] -> [P, I]."""
    activated: Tensor = experts._apply_gate(doubled)
    return activated
