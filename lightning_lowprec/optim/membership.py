"""Whether the optimizers hold the weights that train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer


def check_membership(parameters: Mapping[str, nn.Parameter], optimizers: Iterable[Optimizer], others: set[int]) -> None:
    """Raise if a trainable parameter is in no optimizer.

    Args:
        parameters: by fqn, the parameters to look for (of converted layers).
        optimizers: all that will step.
        others: ``id`` of every parameter of the model, to tell a stale one (held by an optimizer, in no module).

    Raises:
        RuntimeError: names the first such parameter, and the stale one of its shape if there is one.
    """
    held = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = {fqn: p for fqn, p in parameters.items() if p.requires_grad and id(p) not in held}
    if not missing:
        return
    fqn, parameter = next(iter(missing.items()))
    stale = any(key not in others and p.shape == parameter.shape for key, p in held.items())
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    if stale:
        raise RuntimeError(
            f"{fqn!r}{more} is in no optimizer, but an optimizer holds a parameter of its shape that no module has: it"
            " was built from parameters that have been replaced since. Build the optimizer after the last change to the"
            " model, from `model.parameters()`."
        )
    raise RuntimeError(
        f"{fqn!r}{more} is trainable and in no optimizer, so it would get gradients and never learn. Add it to an"
        " optimizer, or freeze it with `requires_grad_(False)`."
    )
