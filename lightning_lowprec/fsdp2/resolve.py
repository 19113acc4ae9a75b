"""Which strategy a user's words mean, once the precision is known."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from lightning_lowprec.fsdp2.fabric import FabricFSDP2Strategy
from lightning_lowprec.fsdp2.from_fsdp import FSDP1
from lightning_lowprec.fsdp2.trainer import FSDP2Strategy
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.half import HalfMixed

OURS: Final = (FabricFSDP2Strategy, FSDP2Strategy)
_FSDP1_NAMES: Final = ("fsdp", "fsdp_cpu_offload")
_HALF: Final = {
    "16-mixed": "fp16",
    "16": "fp16",
    16: "fp16",
    "bf16-mixed": "bf16",
    "bf16": "bf16",
}


def is_fsdp2(strategy: Any) -> bool:
    """Whether a strategy, or its name, is ours."""
    return isinstance(strategy, OURS) or (isinstance(strategy, str) and strategy.lower() == "fsdp2")


def half_under_fsdp2(precision: Any) -> LowPrecision | None:
    """Our plugin for Lightning's mixed precisions, which gathers half weights and scales the loss; else None."""
    dtype: Any = _HALF.get(precision)
    return None if dtype is None else HalfMixed(dtype)


def resolve_strategy(strategy: Any, names: Collection[str], for_trainer: bool) -> Any:
    """The strategy for one of our precisions: FSDP becomes FSDP2, and a Trainer's FSDP2 works in Fabric and back.

    Checkpoints stay what they are under FSDP: one file in the Trainer, folders in Fabric, unless the user says so.

    Args:
        strategy: what the user gave: a name, an object, or nothing.
        names: the names that Lightning knows.
        for_trainer: for the Trainer, not for Fabric.

    Raises:
        TypeError: a class derived from ``FSDPStrategy``.
        ValueError: an ``FSDPStrategy`` with a choice that FSDP2 has no equal of.
    """
    ours = FSDP2Strategy if for_trainer else FabricFSDP2Strategy
    if isinstance(strategy, OURS) and not isinstance(strategy, ours):
        return ours(**strategy.arguments)
    if isinstance(strategy, str) and strategy.lower() in _FSDP1_NAMES and strategy.lower() in names:
        state_dict_type: Any = "full" if for_trainer else "sharded"
        return ours(state_dict_type=state_dict_type, cpu_offload="offload" in strategy.lower())
    if isinstance(strategy, FSDP1):
        return ours.from_fsdp(strategy)
    return strategy
