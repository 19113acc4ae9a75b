"""Change the class of a module in place, and change it back: the module and its parameters stay the same objects.

A module of a user's subclass gets a class that derives from both, the layer's class and the subclass. So its methods,
and ``isinstance(module, Subclass)``, stay. A role (:class:`RoleModule`) gives a module of any class another forward:
children stay children and every Parameter keeps its owner, so state dicts, optimizers, ties and sharding stay the same.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_NOT_SHADOWED: Final = ("reset_parameters", "extra_repr")
"""Methods of a subclass that no class of ours replaces."""


def become(
    module: nn.Module, cls: type[nn.Module], attributes: Mapping[str, object], later: Iterable[str] = ()
) -> None:
    """Give a module another class, and the attributes that the new class needs and the module does not have.

    The module keeps its attributes, parameters, hooks and children. A module of a subclass of Linear gets a class that
    derives from ``cls`` and its own. :func:`revert` also removes the attributes ``later``, which the new class sets.
    """
    own = type(module)
    added = {name: attributes[name] for name in attributes.keys() - vars(module).keys() - module._parameters.keys()}
    vars(module).update(added, own_class=own, added_attributes=frozenset((*added, *later)))
    module.__class__ = derived(cls, own) if issubclass(own, nn.Linear) and not issubclass(cls, own) else cls


def revert(module: nn.Module) -> None:
    """Undo :func:`become`: give a module its own class back, and remove the attributes that were added."""
    attributes = vars(module)
    module.__class__ = attributes["own_class"]
    for name in (*attributes["added_attributes"], "own_class", "added_attributes"):
        attributes.pop(name, None)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before :func:`become`."""
    own: type[nn.Module] = vars(module).get("own_class", type(module))
    return own


class RoleModule(nn.Module):
    """A module whose class was changed in place, to a class that derives from a role and the module's own class."""

    own_class: type[nn.Module]


def _make_class(cls: Any, own: Any) -> Any:
    """Return a class that derives from ``cls`` and the class of a module; deepcopy and pickle make it anew.

    With a role it has the name of ``own``: code may ask ``"RMSNorm" in type(module).__name__``.
    """

    def reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = object.__reduce_ex__(self, protocol)
        return _empty, (cls, own), *reduced[2:]

    body = {"__reduce_ex__": reduce_ex, "__module__": cls.__module__, "__doc__": cls.__doc__}
    if issubclass(cls, RoleModule):
        return type(own.__name__, (cls, own), body)
    methods = {name: getattr(own, name, None) for name in _NOT_SHADOWED}
    kept = {name: method for name, method in methods.items() if method not in (None, getattr(nn.Linear, name))}
    return type(f"{cls.__name__}_{own.__name__}", (cls, own), {**kept, **body})


derived: Any = functools.cache(_make_class)


def _empty(cls: Any, own: object) -> Any:
    both = derived(cls, own)
    return both.__new__(both)


@contextmanager
def unchanged(model: nn.Module, *, may_change: str | None = None) -> Iterator[None]:
    """Raise if the body of the ``with`` statement changes a fact that conversion must keep, except ``may_change``."""
    alive = [*model.modules(), *model.parameters(), *model.buffers()]  # so that no id is used again
    before = _facts(model)
    yield
    after = _facts(model)
    for what, old in before.items():
        new = after[what]
        if old == new or what == may_change:
            continue
        fqn = next(fqn for fqn in {**old, **new} if old.get(fqn) != new.get(fqn))
        raise RuntimeError(
            f"Conversion of {type(model).__name__} changed {what} of {fqn!r} (before {old.get(fqn)!r}, after"
            f" {new.get(fqn)!r}); nothing would be saved, tied or optimized as before. Leave this layer out with"
            " `keep=[...]`, and please report it."
        )
    del alive


def _facts(model: nn.Module) -> dict[str, dict[str, object]]:
    """Return the value of every fact by fqn. Dicts compare without order, so places are listed as separate facts."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors: dict[str, torch.Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    transient = {f"{fqn}.{name}".lstrip(".") for fqn, m in modules.items() for name in m._non_persistent_buffers_set}
    saved = (fqn for fqn in tensors if fqn not in transient)
    return {
        "the module object": {fqn: id(module) for fqn, module in modules.items()},
        "the Parameter or buffer object": {fqn: id(tensor) for fqn, tensor in tensors.items()},
        "the place in parameters()": {fqn: place for place, (fqn, _) in enumerate(model.named_parameters())},
        "requires_grad": {fqn: tensor.requires_grad for fqn, tensor in tensors.items()},
        "the dtype": {fqn: tensor.dtype for fqn, tensor in tensors.items()},
        "the device": {fqn: tensor.device for fqn, tensor in tensors.items()},
        "the shape": {fqn: None if is_lazy(tensor) else tensor.shape for fqn, tensor in tensors.items()},
        "train or eval": {fqn: module.training for fqn, module in modules.items()},
        "the hooks": {fqn: _hooks(module) for fqn, module in modules.items()},
        "the place in the state dict": {fqn: place for place, fqn in enumerate(saved)},
    }


def _hooks(module: nn.Module) -> dict[str, list[int]]:
    return {
        name: [id(hook) for hook in value.values()]
        for name, value in vars(module).items()
        if name.endswith("_hooks") and isinstance(value, dict) and value
    }
