"""Let state dicts, copies and averages of half-precision weights have the float32 values that exist.

| what a program does | what it gets |
|---|---|
| ``load_state_dict`` | a value of more bits reaches the master, or is kept for it |
| ``state_dict`` | frozen weights with the float32 values from before the cast; others as they are |
| ``copy.deepcopy`` | float32 weights with the masters' values: a copy has no master, and averages of bf16 stand still |
| ``AveragedModel.update_parameters`` | a float32 average takes the masters' values |
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from lightning_lowprec.masters.float32_values import is_marked, keep, kept
from lightning_lowprec.masters.registry import existing_masters, places_of
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.private.torch import with_local_tensor

_patches: Final[list[tuple[type, Callable[..., object], Callable[..., object]]]] = []
_watched: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()


def watch(module: nn.Module) -> None:
    """Let the half-precision parameters of ``module`` take and show float32 values in state dicts; once per module."""
    _patch()
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):  # takes no hooks
            continue
        if part not in _watched and any(p.dtype in HALF_DTYPES for p in part.parameters(recurse=False)):
            load, show = part.register_load_state_dict_pre_hook, part.register_state_dict_post_hook
            _watched[part] = [load(_take), show(_show_kept)]  # type: ignore[no-untyped-call]


def unwatch(module: nn.Module) -> None:
    """Undo :func:`watch`."""
    for part in module.modules():
        for handle in _watched.pop(part, ()):
            handle.remove()


def arrive(parameter: Tensor, value: Tensor) -> Tensor:
    """Take the loaded value of a half-precision parameter for its master, or keep it; return the float32 value."""
    for store, index in places_of(parameter):
        store.arrive({id(parameter): value})
        return with_local_tensor(store.views[index].clone(), parameter)
    keep(parameter, value, on_host=not parameter.requires_grad)
    return value


def _take(module: nn.Module, state_dict: dict[str, object], prefix: str, *_: object) -> None:
    for name, p in module.named_parameters(recurse=False):
        value = state_dict.get(f"{prefix}{name}")
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != p.shape:
            continue
        if p.dtype in HALF_DTYPES and value.dtype != p.dtype:
            state_dict[f"{prefix}{name}"] = arrive(p, value)


def _show_kept(module: nn.Module, state_dict: dict[str, object], prefix: str, _: Mapping[str, object]) -> None:
    params = dict(module.named_parameters(recurse=False))
    values = kept(p for p in params.values() if not p.requires_grad)
    for name, p in params.items():
        key = f"{prefix}{name}"
        if id(p) in values and key in state_dict and state_dict[key] is not p:  # `keep_vars` shows parameters
            state_dict[key] = values[id(p)]


def float32_value(parameter: Tensor) -> Tensor:
    """Return the float32 value of a parameter that a plugin has cast, or the parameter itself."""
    if parameter.dtype not in HALF_DTYPES or not is_marked(parameter):
        return parameter
    return existing_masters([parameter]).get(id(parameter), parameter.detach().float())


def _patch() -> None:
    """Let copies and averages see float32 values, once per process; parameters that no plugin has cast are torch's."""
    if _patches:
        return
    copied, averaged = Parameter.__deepcopy__, AveragedModel.update_parameters

    @functools.wraps(copied)
    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo and (value := float32_value(self)) is not self:
            memo[id(self)] = Parameter(value, self.requires_grad)
        return copied(self, memo)  # type: ignore[no-untyped-call]

    @functools.wraps(averaged)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        def parameters() -> Iterator[Tensor]:
            for p, own in zip(model.parameters(), self.module.parameters(), strict=False):
                yield p.to(own.dtype) if own.dtype in HALF_DTYPES else float32_value(p)

        averaged(self, SimpleNamespace(buffers=model.buffers, parameters=parameters))  # type: ignore[arg-type]

    _patches.extend([(Parameter, copied, deepcopy), (AveragedModel, averaged, update_parameters)])
    for owner, original, replacement in _patches:
        setattr(owner, original.__name__, replacement)


def unpatch() -> None:
    """Put torch's own copies and averages back, until :func:`watch` is called again."""
    while _patches:
        owner, original, replacement = _patches.pop()
        if getattr(owner, original.__name__) is replacement:  # else another package wrapped the patch
            setattr(owner, original.__name__, original)
