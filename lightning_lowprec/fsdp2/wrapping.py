"""Which modules of a model are sharded, checkpointed and compiled as one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from torch import nn

from lightning_lowprec.fsdp2.options import Modules


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """By fqn: the children, all of one class, of the outermost ModuleLists and Sequentials with several children.

    A child without parameters is no block; a list of Linears is one of layers, not of blocks.
    """
    found: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for fqn, module in model.named_modules():
        if (inside and fqn.startswith(inside)) or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = dict(module.named_children())
        same = len(children) > 1 and len({type(child) for child in children.values()}) == 1
        deep = all(any(True for _ in child.children()) for child in children.values())
        if same and deep and all(any(True for _ in child.parameters()) for child in children.values()):
            prefix = f"{fqn}." if fqn else ""
            found |= {f"{prefix}{name}": child for name, child in children.items()}
            inside = (*inside, prefix)
            if not fqn:
                break
    return found


def chosen(model: nn.Module, choice: Literal["auto"] | Modules, option: str) -> dict[str, nn.Module]:
    """By fqn: the modules that ``choice`` means, the model itself left out.

    Raises:
        ValueError: classes or a predicate that match nothing.
    """
    if isinstance(choice, str):
        return blocks(model)
    modules = {fqn: module for fqn, module in model.named_modules() if fqn and _matches(choice, fqn, module)}
    if not modules:
        have = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(
            f"`{option}={_shown(choice)}` matches no module of {type(model).__name__}; its modules are of the classes"
            f" {', '.join(have)}."
        )
    return modules


def _matches(choice: Modules, fqn: str, module: nn.Module) -> bool:
    if isinstance(choice, Collection):
        return isinstance(module, tuple(choice))
    predicate: Callable[[str, nn.Module], bool] = choice
    return bool(predicate(fqn, module))


def _shown(choice: Modules) -> str:
    return str([c.__name__ for c in choice]) if isinstance(choice, Collection) else repr(choice)
