"""Errors for models that a precision would train wrongly, raised at set-up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import lightning.pytorch.callbacks
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn import Module

from lightning_lowprec.conversion.backends import coded_weight

AVERAGING: Final = ("StochasticWeightAveraging", "WeightAveraging")
"""Callbacks that average parameters; lightning 2.6 added ``WeightAveraging``."""


def refuse_codes(module: Module, precision: str, backend: str | None) -> None:
    """Raise for a model whose weights another backend keeps as codes.

    Raises:
        TypeError: the message names one of the weights.
    """
    found = coded_weight(module)
    if found is not None and found[0].name != backend:
        raise TypeError(
            f"`precision={precision!r}`: {type(module).__name__} keeps {found[1]!r} as codes with a scale, from an"
            f" earlier run under {found[0].title}. Load its state dict, which is plain, into a fresh model."
        )


def refuse_sharded(module: Module, precision: str) -> None:
    """Raise for a model that is sharded already, because the precision can no longer convert or cast it.

    Raises:
        TypeError: the message names one of the sharded parameters.
    """
    fqn = next((fqn for fqn, p in module.named_parameters() if hasattr(p, "to_local")), None)
    if fqn is not None:
        raise TypeError(
            f"`precision={precision!r}`: {type(module).__name__} is sharded already ({fqn!r} is a DTensor), so it can"
            " no longer be converted. If 'fsdp2' sharded it, under another precision or in an earlier set-up, build the"
            " model anew and load its checkpoint. Else leave sharding to `strategy='fsdp2'`, or keep"
            " `ModelParallelStrategy` and shard with `lightning_lowprec.parallelize(model, mesh, plugin)`."
        )


def refuse_uncast(sharded: Iterable[Module] | None, precision: str) -> None:
    """Raise if the user sharded a model in Fabric without casting it to the precision's half-precision weights.

    Raises:
        RuntimeError: the message names the two ways to shard.
    """
    if sharded is not None and not list(sharded):
        raise RuntimeError(
            f"`precision={precision!r}` keeps its weights in half precision, but the model was sharded without it. Use"
            " `strategy='fsdp2'`, or shard with `lightning_lowprec.parallelize(model, mesh, plugin)`."
        )


def refuse_averaging(callbacks: Iterable[Any], why: str) -> None:
    """Raise for Lightning's callbacks that average the model's parameters.

    Args:
        callbacks: the callbacks of the Trainer.
        why: the end of the message: the reason and the remedy.

    Raises:
        MisconfigurationException: the message names the callback.
    """
    kinds = tuple(getattr(lightning.pytorch.callbacks, name, ()) for name in AVERAGING)
    for callback in callbacks:
        if isinstance(callback, kinds):
            raise MisconfigurationException(f"`{type(callback).__name__}` {why}")
