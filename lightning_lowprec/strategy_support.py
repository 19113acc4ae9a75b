"""Under which strategies our precisions run; everything else is refused, since Lightning would train in silent fp32."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning.fabric import strategies as fabric
from lightning.pytorch import strategies as trainer

from lightning_lowprec.precision.base import LowPrecision

SHARDED = (fabric.ModelParallelStrategy, trainer.ModelParallelStrategy)
"""Of these, ours shard by themselves; under Lightning's own, ``parallelize`` does our part in the user's code."""
SUPPORTED = (
    *SHARDED,
    fabric.DDPStrategy,
    fabric.SingleDeviceStrategy,
    trainer.DDPStrategy,
    trainer.SingleDeviceStrategy,
)
UNSUPPORTED = (  # some of Lightning's derive from the ones above
    fabric.DeepSpeedStrategy,
    fabric.SingleDeviceXLAStrategy,
    fabric.XLAStrategy,
    trainer.DeepSpeedStrategy,
    trainer.SingleDeviceXLAStrategy,
    trainer.XLAStrategy,
)
UNSHARDED = "one device, 'ddp' and its kin (ddp_spawn, ddp_fork, ddp_notebook, ddp_find_unused_parameters_true)"
SHARDED_TOO = ", 'fsdp2', or 'fsdp', which becomes 'fsdp2'"


def check_strategy(plugin: LowPrecision, strategy: Any, names: Collection[str], registry: Mapping[str, Any]) -> None:
    """Raise if ``plugin`` does not run under ``strategy``.

    Args:
        plugin: the precision's.
        strategy: a strategy object, or a name; ``"auto"`` and unknown names pass (Lightning has the last word there).
        names: the strategy names that Lightning knows.
        registry: Lightning's registry, name -> ``{"strategy": class, ...}``.

    Raises:
        ValueError: the strategy is none of ``SUPPORTED``, or one of ``UNSUPPORTED``.
    """
    if isinstance(strategy, str):
        name = strategy.lower()
        if name == "auto" or name not in names:
            return
        cls = registry[name]["strategy"]
    else:
        name, cls = type(strategy).__name__, type(strategy)
    whole = plugin.keeps_codes and not plugin.shards_codes
    unsupported = (*UNSUPPORTED, *SHARDED) if whole else UNSUPPORTED
    if not issubclass(cls, SUPPORTED) or issubclass(cls, unsupported):
        works = UNSHARDED + ("; under 'fsdp2', 'msamp-o3' does" if whole else SHARDED_TOO)
        raise ValueError(
            f"`precision={plugin.precision!r}` does not run under `strategy={name!r}` yet. It runs under {works}."
        )


def check_comm_hook(plugin: LowPrecision, hook: object) -> None:
    """Raise if both the plugin and the user want to reduce DDP's gradients.

    Raises:
        ValueError: ``hook`` (what the user gave ``DDPStrategy(ddp_comm_hook=...)``) would run beside ours.
    """
    if hook is not None and plugin.masters is not None and plugin.masters.gradients.reduces:
        raise ValueError(
            f"`ddp_comm_hook={getattr(hook, '__name__', hook)}` does not go with {plugin.masters.gradients}: DDP has"
            " one communication hook, and reducing in float32 needs it. Leave one of them out."
        )
