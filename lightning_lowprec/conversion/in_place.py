"""Change the class of a module in place, and change it back: the module and its parameters stay the same objects.

A module of a user's subclass gets a class that derives from both, the layer's class and the subclass. So its methods,
and ``isinstance(module, Subclass)``, stay. A role (:class:`RoleModule`) gives a module of any class another forward:
children stay children and every Parameter keeps its owner, so state dicts, optimizers, ties and sharding stay the same.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from torch import nn

_NOT_SHADOWED: Final = ("reset_parameters", "extra_repr")
"""Methods of a subclass that no class of ours replaces."""


def become(module: Any, cls: type[nn.Module], attributes: Mapping[str, Any], later: Iterable[str] = ()) -> None:
    """Give a module another class, and the attributes that the new class needs and the module does not have.

    The module keeps its attributes, parameters, hooks and children. A module of a subclass of Linear gets a class that
    derives from ``cls`` and its own. :func:`revert` also removes the attributes ``later``, which the new class sets.
    """
    own = type(module)
    added = {name: attributes[name] for name in attributes.keys() - vars(module).keys() - module._parameters.keys()}
    vars(module).update(added, own_class=own, added_attributes=frozenset((*added, *later)))
    classes: tuple[Any, Any] = cls, own
    module.__class__ = cls if issubclass(cls, own) or not issubclass(own, nn.Linear) else _both(*classes)


def revert(module: Any) -> None:
    """Undo :func:`become`: give a module its own class back, and remove the attributes that were added."""
    module.__class__ = module.own_class
    for name in (*module.added_attributes, "own_class", "added_attributes"):
        vars(module).pop(name, None)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before :func:`become`."""
    own: type[nn.Module] = vars(module).get("own_class", type(module))
    return own


@functools.cache
def _both(cls: Any, own: Any) -> Any:
    """Return the class of a layer of ``cls`` that was made of a module of the subclass ``own``."""
    kept = {name: getattr(own, name) for name in _NOT_SHADOWED if getattr(own, name) is not getattr(nn.Linear, name)}

    def reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = object.__reduce_ex__(self, protocol)
        return _empty, (cls, own), *reduced[2:]

    body = {**kept, "__reduce_ex__": reduce_ex, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return types.new_class(f"{cls.__name__}_{own.__name__}", (cls, own), exec_body=lambda names: names.update(body))


def _empty(cls: Any, own: Any) -> nn.Module:
    """Make a module without attributes, for copies and pickles."""
    both: Any = _both(cls, own)
    module: nn.Module = both.__new__(both)
    return module


class RoleModule(nn.Module):
    """A module whose class was changed in place, to a class that derives from ``role`` and the module's own class."""

    own_class: type[nn.Module]
    role: ClassVar[type[RoleModule]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Support deepcopy and pickle, which cannot import a class that was made at run time."""
        return _new, (self.role, self.own_class), self.__dict__


@functools.cache
def _class_of(role: Any, own_class: Any) -> Any:
    """Return a class with the name of ``own_class``: code may ask ``"RMSNorm" in type(module).__name__``."""
    return type(own_class.__name__, (role, own_class), {"role": role, "__module__": role.__module__})


def _new(role: type[RoleModule], own_class: type[nn.Module]) -> Any:
    cls = _class_of(role, own_class)  # type: ignore[arg-type]
    return cls.__new__(cls)


def take_role(module: nn.Module, role: type[RoleModule], attributes: Mapping[str, Any]) -> None:
    """Give a module a role in place, and the attributes that the role needs; ``in_place.revert`` undoes it."""
    become(module, _class_of(role, type(module)), attributes)  # type: ignore[arg-type]
