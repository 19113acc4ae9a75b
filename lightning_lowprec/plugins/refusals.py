"""What a precision cannot do, said where it would otherwise go wrong in silence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn import Module
from torch.optim import LBFGS


def refuse_lbfgs(optimizer: Any, precision: str) -> None:
    """Raise for an optimizer whose step cannot be unscaled."""
    if isinstance(optimizer, LBFGS):
        raise MisconfigurationException(
            f"`precision={precision!r}` scales the loss, and LBFGS evaluates the closure many times per step: they do"
            " not go together. Use a bf16 precision, or another optimizer."
        )


def refuse_sharded(module: Module, precision: str) -> None:
    """Raise for a model whose parameters are sharded already: it would train without what the precision promises."""
    fqn = next((fqn for fqn, p in module.named_parameters() if hasattr(p, "to_local")), None)
    if fqn is not None:
        raise TypeError(
            f"`precision={precision!r}`: {type(module).__name__} is sharded already ({fqn!r} is a DTensor), so it can"
            " no longer be converted. Use `strategy='fsdp2'` and leave sharding to it, or keep `ModelParallelStrategy`"
            " and shard with `lightning_lowprec.parallelize(model, mesh, plugin)`."
        )


def refuse_uncast(sharded: Iterable[Module] | None, precision: str) -> None:
    """Raise if the model of a precision with half weights was sharded by hand, in Fabric, and so was never cast."""
    if sharded is not None and not list(sharded):
        raise RuntimeError(
            f"`precision={precision!r}` keeps its weights in half precision, but the model was sharded without it. Use"
            " `strategy='fsdp2'`, or shard with `lightning_lowprec.parallelize(model, mesh, plugin)`."
        )
