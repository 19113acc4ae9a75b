"""That what was converted will train: every trainable weight of a converted layer is in some optimizer."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Module
from torch.optim import Optimizer

from lightning_lowprec.conversion.membership import check_membership


def check_converted(
    modules: list[Module],
    unchecked: Iterable[Module],
    optimizers: list[Optimizer],
    kinds: type[Module] | tuple[type[Module], ...],
    *,
    sharded: bool,
    also: Iterable[Module] = (),
) -> None:
    """Raise if a trainable weight of a converted layer is in no optimizer, or an optimizer holds a stale one.

    Args:
        modules: everything that was set up.
        unchecked: what was set up since the last check.
        optimizers: all that are known.
        kinds: the classes of converted layers.
        sharded: whether weights may be gathered; they are freed, since gathered ones would show copies.
        also: more layers that are converted.
    """
    more = {id(layer) for layer in also}
    if sharded:
        from lightning_lowprec.fsdp2.forward_hooks import reshard

        for module in modules:
            reshard(module)
    of_any_module = {id(p) for module in modules for p in module.parameters()}
    for module in unchecked:
        layers = [layer for layer in module.modules() if isinstance(layer, kinds) or id(layer) in more]
        converted = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
        check_membership(dict(module.named_parameters()), optimizers, converted=converted, of_any_module=of_any_module)
