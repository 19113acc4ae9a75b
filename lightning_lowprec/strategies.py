"""Strategies and our precisions: what a user's words mean, what runs, and what is refused.

A precision under a strategy that this package does not know is refused, since Lightning would train in float32 without
a word.
"""

from collections.abc import Mapping
from functools import cache
from types import new_class
from typing import Any, Final

from lightning_lowprec.fsdp2.fabric import FabricFSDP2Strategy, ForFabric
from lightning_lowprec.fsdp2.from_fsdp import FSDP1
from lightning_lowprec.fsdp2.strategy import FSDP2Base
from lightning_lowprec.fsdp2.trainer import ForTrainer, FSDP2Strategy
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.half import HalfMixed
from lightning_lowprec.private.either import MAIN, Package, both
from lightning_lowprec.private.either import fabric_strategies as fabric
from lightning_lowprec.private.either import trainer_strategies as trainer
from lightning_lowprec.zero import DEEPSPEED, check_plugin

_FSDP1_NAMES: Final = ("fsdp", "fsdp_cpu_offload")
_HALF: Final = {"16-mixed": "fp16", "16": "fp16", 16: "fp16", "bf16-mixed": "bf16", "bf16": "bf16"}


def is_fsdp2(strategy: object) -> bool:
    """Whether a strategy, or its name, is ours."""
    return isinstance(strategy, FSDP2Base) or (isinstance(strategy, str) and strategy.lower() == "fsdp2")


def half_under_fsdp2(precision: object) -> LowPrecision | None:
    """Our plugin for Lightning's mixed precisions, which gathers half weights and scales the loss; else None."""
    dtype: Any = _HALF.get(precision)
    return None if dtype is None else HalfMixed(dtype, weights="keep")  # as under Lightning's other strategies


@cache
def fsdp2_class(package: Package, *, for_trainer: bool) -> Any:
    """Return the class of ``strategy="fsdp2"`` in a package of Lightning: a public one in the main package."""
    ours = FSDP2Strategy if for_trainer else FabricFSDP2Strategy
    if package is MAIN:
        return ours
    module = package.module("pytorch.strategies" if for_trainer else "fabric.strategies")
    bases = (ForTrainer if for_trainer else ForFabric, module.ModelParallelStrategy)
    return new_class(ours.__name__, bases, exec_body=lambda body: body.update(__doc__="", __module__=ours.__module__))


def resolve_strategy(strategy: Any, package: Package, for_trainer: bool) -> Any:
    """The strategy for one of our precisions: FSDP becomes FSDP2, and ours for another part of Lightning one for this.

    Checkpoints stay what they are under FSDP: one file in the Trainer, folders in Fabric.
    """
    ours = fsdp2_class(package, for_trainer=for_trainer)
    if isinstance(strategy, FSDP2Base) and not isinstance(strategy, ours):
        return ours(**strategy.arguments)
    if isinstance(strategy, str) and strategy.lower() in _FSDP1_NAMES:
        state_dict_type: Any = "full" if for_trainer else "sharded"
        return ours(state_dict_type=state_dict_type, cpu_offload="offload" in strategy.lower())
    if isinstance(strategy, both(*FSDP1)):
        return ours.from_fsdp(strategy)
    return strategy


# ---- what runs, and what is refused

SHARDED = (fabric.ModelParallelStrategy, trainer.ModelParallelStrategy)
"""Of these, ours shard by themselves; under Lightning's own, ``parallelize`` does our part in the user's code."""
_WHOLE = (fabric.DDPStrategy, fabric.SingleDeviceStrategy, trainer.DDPStrategy, trainer.SingleDeviceStrategy)
SUPPORTED = (*SHARDED, *DEEPSPEED, *_WHOLE)
UNSUPPORTED = (  # some of Lightning's derive from the ones above
    fabric.SingleDeviceXLAStrategy,
    fabric.XLAStrategy,
    trainer.SingleDeviceXLAStrategy,
    trainer.XLAStrategy,
)
UNSHARDED = "one device, 'ddp' and its variants (ddp_spawn, ddp_fork, ddp_notebook, ddp_find_unused_parameters_true)"
FSDP2_TOO = ", 'fsdp2', or 'fsdp', which becomes 'fsdp2'"
SHARDED_TOO = f"{FSDP2_TOO}, or 'deepspeed_stage_1', '_2' and '_3'"


def check_strategy(plugin: LowPrecision, strategy: Any, registry: Mapping[str, Any]) -> None:
    """Raise if ``plugin`` does not run under ``strategy``, an object or a name; "auto" and unknown names pass."""
    if isinstance(strategy, str):
        name = strategy.lower()
        if name not in registry:
            return
        cls = registry[name]["strategy"]
    else:
        name, cls = type(strategy).__name__, type(strategy)
    codes = plugin.keeps_codes
    whole = codes and not plugin.shards_codes
    unsupported = (*UNSUPPORTED, *(SHARDED if whole else ()), *(DEEPSPEED if codes else ()))
    if not issubclass(cls, both(*SUPPORTED)) or issubclass(cls, both(*unsupported)):
        works = UNSHARDED + ("; under 'fsdp2', 'msamp-o3' does" if whole else FSDP2_TOO if codes else SHARDED_TOO)
        raise ValueError(
            f"`precision={plugin.precision!r}` does not run under `strategy={name!r}` yet. It runs under {works}."
        )
    accumulation = None if plugin.masters is None else plugin.masters.accumulation
    if issubclass(cls, both(*DEEPSPEED)):
        check_plugin(plugin, name)
    elif plugin.engine is not None:
        raise ValueError(
            f"`{plugin}` has left its options to {plugin.engine.name}, in an earlier Trainer or Fabric. Make a new"
            f" plugin for `strategy={name!r}`."
        )
    elif accumulation is not None and issubclass(cls, both(fabric.DDPStrategy, trainer.DDPStrategy)):
        raise ValueError(
            f"`grad_accumulation_dtype={accumulation}` does not run under `strategy={name!r}`: DDP refuses gradients of"
            " another dtype than the weights'. Use `strategy='fsdp2'`, which adds gradients up and reduces them in"
            " float32, or leave the option out (of NeMo's recipes: `grad_reduce_in_fp32=False`)."
        )
