"""Check that the optimizers hold the weights that train.

Conversion, sharding and users replace parameters. An optimizer that was built before the replacement holds stale
parameters, which no model has any more. The model would then train without learning. These checks raise instead.
A weight that no optimizer was given, as in linear probing, trains as in stock Lightning, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from torch import nn
from torch.optim import Optimizer

from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.private.torchao import parameters_of_copies


def check_converted(
    modules: Iterable[nn.Module],
    unchecked: Iterable[nn.Module],
    optimizers: list[Optimizer],
    layers_of: Callable[[nn.Module], Iterable[nn.Module]],
) -> list[str]:
    """Raise if an optimizer holds a stale weight; return a warning per module with weights that no optimizer holds.

    Args:
        modules: every module that was set up. Under FSDP2 none of their weights may be gathered at this moment.
        unchecked: the modules that were set up since the last check.
        optimizers: all optimizers that are known.
        layers_of: finds the converted layers of a module.

    Raises:
        RuntimeError: see :func:`check_membership`.
    """
    of_any_module = {id(p) for module in modules for p in module.parameters()}
    found = []
    for module in unchecked:
        converted = {id(p) for layer in layers_of(module) for p in layer.parameters(recurse=False)}
        parameters = dict(module.named_parameters())
        found.append(check_membership(parameters, optimizers, converted=converted, of_any_module=of_any_module))
    return [warning for warning in found if warning is not None]


def check_membership(
    parameters: Mapping[str, nn.Parameter],
    optimizers: Iterable[Optimizer],
    *,
    converted: Set[int],
    of_any_module: Set[int],
) -> str | None:
    """Return a warning if a trainable parameter of a converted layer is in no optimizer; raise if it was replaced.

    A module passes if the optimizers hold no parameter of it at all, not even a stale parameter: the module may be a
    teacher, or get its optimizer later.

    Args:
        parameters: the parameters of one module, by fqn.
        optimizers: all optimizers that are known.
        converted: ``id`` of every parameter of a converted layer.
        of_any_module: ``id`` of every parameter of every module that is set up. An optimizer's parameter that
            is not among them is stale.

    Raises:
        RuntimeError: an optimizer holds a stale parameter of the same shape; the message names the first missing one.
    """
    held = {id(p): p for optimizer in optimizers for p in parameters_of_copies(optimizer) or parameters_of(optimizer)}
    missing = {fqn: p for fqn, p in parameters.items() if id(p) in converted and id(p) not in held and p.requires_grad}
    if not missing:
        return None
    fqn, parameter = next(iter(missing.items()))
    names = repr(fqn) + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
    if any(key not in of_any_module and p.shape == parameter.shape for key, p in held.items()):
        raise RuntimeError(
            f"{names} is in no optimizer, but an optimizer holds a parameter of its shape that no module has: it was"
            " built from parameters that have been replaced since. Build the optimizer after the last change to the"
            " model, from `model.parameters()`."
        )
    if not any(id(p) in held for p in parameters.values()):
        return None
    return (
        f"{names} is trainable and in no optimizer: it gets gradients and never learns. Freeze it with"
        " `requires_grad_(False)`, which saves its gradients, or add it to an optimizer."
    )
