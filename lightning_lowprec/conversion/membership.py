"""Whether the optimizers hold the weights that train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from torch import nn
from torch.optim import Optimizer


def check_membership(
    parameters: Mapping[str, nn.Parameter],
    optimizers: Iterable[Optimizer],
    *,
    converted: Set[int],
    of_any_module: Set[int],
) -> None:
    """Raise if a trainable parameter of a converted layer is in no optimizer.

    A module of which the optimizers hold nothing at all, not even a stale parameter, is left alone: it may be a
    teacher, or get its optimizer later.

    Args:
        parameters: those of one module, by fqn.
        optimizers: all that are known.
        converted: ``id`` of the parameters of converted layers.
        of_any_module: ``id`` of the parameters of every module that is set up; one that an optimizer holds and no
            module has is stale.

    Raises:
        RuntimeError: names the first such parameter, and the stale one of its shape if there is one.
    """
    held = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = {fqn: p for fqn, p in parameters.items() if id(p) in converted and id(p) not in held and p.requires_grad}
    if not missing:
        return
    fqn, parameter = next(iter(missing.items()))
    names = repr(fqn) + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
    if any(key not in of_any_module and p.shape == parameter.shape for key, p in held.items()):
        raise RuntimeError(
            f"{names} is in no optimizer, but an optimizer holds a parameter of its shape that no module has: it was"
            " built from parameters that have been replaced since. Build the optimizer after the last change to the"
            " model, from `model.parameters()`."
        )
    if any(id(p) in held for p in parameters.values()):
        raise RuntimeError(
            f"{names} is trainable and in no optimizer, so it would get gradients and never learn. Add it to an"
            " optimizer, or freeze it with `requires_grad_(False)`."
        )
