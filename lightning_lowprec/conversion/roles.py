"""Give a module of any class another forward: its class becomes a subclass of a role and of its own class.

The module keeps the methods and attributes of its own class, such as the activation of an MLP. Children stay children
and every Parameter keeps its owner, so state dicts, optimizers, ties and sharding stay the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from lightning_lowprec.conversion.in_place import become


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
