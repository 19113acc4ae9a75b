"""FSDP1's wrapping policies in the words of FSDP2: classes, or a predicate of fqn and module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch import nn
from torch.distributed.fsdp import wrap

from lightning_lowprec.fsdp2.options import Modules

_MANY: Final = 2**62


def classes_or_predicate(policy: Any, argument: str, option: str) -> Modules:
    """What ``policy`` chooses.

    Args:
        policy: a set of classes, a ``ModuleWrapPolicy``, one of torch's policy functions (with ``functools.partial``),
            or any function of ``module``, ``recurse`` and ``nonwrapped_numel``.
        argument: what FSDPStrategy calls it, for messages.
        option: what FSDP2 calls it, for messages.

    Raises:
        ValueError: a policy of the modules' size; a function is asked about each module when the model is there, and
            raises then.
        ImportError: torch has changed ``ModuleWrapPolicy``.
    """
    if isinstance(policy, set):
        return _in_order(policy)
    if isinstance(policy, wrap.ModuleWrapPolicy):
        if not hasattr(policy, "_module_classes"):
            raise ImportError(f"torch has moved the classes of ModuleWrapPolicy; pass them by `{option}=` instead.")
        return _in_order(policy._module_classes)
    function = policy.func if isinstance(policy, partial) else policy
    if function is wrap.transformer_auto_wrap_policy and "transformer_layer_cls" in getattr(policy, "keywords", {}):
        return _in_order(policy.keywords["transformer_layer_cls"])
    if function is wrap.always_wrap_policy:
        return _has_parameters
    if function is wrap.size_based_auto_wrap_policy:
        raise _by_size(policy, argument, option)
    if not callable(policy) or isinstance(policy, wrap.CustomPolicy):
        raise ValueError(
            f"`{argument}={policy!r}` has no equal in FSDP2; pass classes or a function (fqn, module) -> bool by"
            f" `{option}=`."
        )
    return _asked(policy, argument, option)


def _in_order(classes: Any) -> Modules:
    return tuple(sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__)))


def _has_parameters(fqn: str, module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _by_size(policy: Any, argument: str, option: str) -> ValueError:
    return ValueError(
        f"`{argument}={policy!r}` chooses modules by their size, which FSDP2 does not; pass classes or a function"
        f" (fqn, module) -> bool by `{option}=`, or leave it out to gather the repeated blocks."
    )


def _asked(policy: Callable[..., bool], argument: str, option: str) -> Callable[[str, nn.Module], bool]:
    """``policy`` as a predicate; it is asked with 0 and with very many parameters, and must say the same."""

    def predicate(fqn: str, module: nn.Module) -> bool:
        few, many = (
            [bool(policy(module=module, recurse=recurse, nonwrapped_numel=numel)) for recurse in (False, True)]
            for numel in (0, _MANY)
        )
        if few != many:
            raise _by_size(policy, argument, option)
        chosen, descends = many
        if not descends and (chosen or any(True for _ in module.children())):
            raise ValueError(
                f"`{argument}={policy!r}` does not descend into {fqn!r} (it says False to `recurse=True`), which has no"
                f" equal in FSDP2; pass classes or a function (fqn, module) -> bool by `{option}=`."
            )
        return chosen

    return predicate
