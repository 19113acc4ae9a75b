"""What a precision cannot do, said where it would otherwise go wrong in silence."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Module


def refuse_sharded(module: Module, precision: str) -> bool:
    """Raise for a model whose parameters are sharded already: it would train without what the precision promises."""
    fqn = next((fqn for fqn, p in module.named_parameters() if hasattr(p, "to_local")), None)
    if fqn is not None:
        raise TypeError(
            f"`precision={precision!r}`: {type(module).__name__} is sharded already ({fqn!r} is a DTensor), so it can"
            " no longer be converted. Use `strategy='fsdp2'` and leave sharding to it, or keep `ModelParallelStrategy`"
            " and shard with `lightning_lowprec.parallelize(model, mesh, plugin)`."
        )
    return False


def refuse_uncast(sharded: Iterable[Module] | None, precision: str) -> None:
    """Raise if the model of a precision with half weights was sharded by hand, in Fabric, and so was never cast."""
    if sharded is not None and not list(sharded):
        raise RuntimeError(
            f"`precision={precision!r}` keeps its weights in half precision, but the model was sharded without it. Use"
            " `strategy='fsdp2'`, or shard with `lightning_lowprec.parallelize(model, mesh, plugin)`."
        )
