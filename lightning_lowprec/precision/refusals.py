"""What a precision cannot do, said where it would otherwise go wrong in silence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import lightning.pytorch.callbacks
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn import Module

from lightning_lowprec.msamp.weight import msamp_state_of

AVERAGING: Final = ("StochasticWeightAveraging", "WeightAveraging")
"""Callbacks; the second came with lightning 2.6."""


def refuse_unfit(module: Module, precision: str, keeps_codes: bool) -> bool:
    """Raise for a model that this precision would train wrongly: sharded already, or kept as codes by another."""
    fqn = next((fqn for fqn, p in module.named_parameters() if msamp_state_of(p) is not None), None)
    if fqn is not None and not keeps_codes:
        raise TypeError(
            f"`precision={precision!r}`: {type(module).__name__} keeps {fqn!r} as codes with a scale, from an earlier"
            " run under MS-AMP. Load its state dict, which is plain, into a fresh model."
        )
    return refuse_sharded(module, precision)


def refuse_averaging(callbacks: Iterable[Any], why: str) -> None:
    """Raise for Lightning's callbacks that average the model's parameters.

    Args:
        callbacks: the Trainer's.
        why: it cannot be done, and what can be done instead.

    Raises:
        MisconfigurationException: names the callback.
    """
    kinds = tuple(getattr(lightning.pytorch.callbacks, name, ()) for name in AVERAGING)
    for callback in callbacks:
        if isinstance(callback, kinds):
            raise MisconfigurationException(f"`{type(callback).__name__}` {why}")


def refuse_sharded(module: Module, precision: str) -> bool:
    """Raise for a model whose parameters are sharded already: it would train without what the precision promises."""
    fqn = next((fqn for fqn, p in module.named_parameters() if hasattr(p, "to_local")), None)
    if fqn is not None:
        raise TypeError(
            f"`precision={precision!r}`: {type(module).__name__} is sharded already ({fqn!r} is a DTensor), so it can"
            " no longer be converted. If 'fsdp2' sharded it, under another precision or in an earlier set-up, build the"
            " model anew and load its checkpoint. Else leave sharding to `strategy='fsdp2'`, or keep"
            " `ModelParallelStrategy` and shard with `lightning_lowprec.parallelize(model, mesh, plugin)`."
        )
    return False


def refuse_uncast(sharded: Iterable[Module] | None, precision: str) -> None:
    """Raise if the model of a precision with half weights was sharded by hand, in Fabric, and so was never cast."""
    if sharded is not None and not list(sharded):
        raise RuntimeError(
            f"`precision={precision!r}` keeps its weights in half precision, but the model was sharded without it. Use"
            " `strategy='fsdp2'`, or shard with `lightning_lowprec.parallelize(model, mesh, plugin)`."
        )
