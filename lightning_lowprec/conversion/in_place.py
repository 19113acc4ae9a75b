"""Change the class of a module in place, and change it back: the module and its parameters stay the same objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn


def become(module: Any, cls: type[nn.Module], attributes: Mapping[str, Any], later: Iterable[str] = ()) -> None:
    """Give a module another class, and the attributes that the new class needs and the module does not have.

    Args:
        module: changed in place; it keeps its attributes, parameters, hooks and children.
        cls: the new class.
        attributes: such as the ``__dict__`` of an object that the constructor of ``cls`` has made.
        later: names of attributes that the new class sets after this, and that :func:`revert` removes too.
    """
    added = {name: attributes[name] for name in attributes.keys() - vars(module).keys() - module._parameters.keys()}
    vars(module).update(added, own_class=type(module), added_attributes=frozenset((*added, *later)))
    module.__class__ = cls


def revert(module: Any) -> None:
    """Undo :func:`become`: give a module its own class back, and remove the attributes that were added."""
    module.__class__ = module.own_class
    for name in (*module.added_attributes, "own_class", "added_attributes"):
        vars(module).pop(name, None)
