"""How torch's modules keep their hooks and compiled calls; `torch.py` has the list of these names."""

from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn


def is_compiled(module: nn.Module) -> bool:
    """Return whether the user compiled ``module`` itself, by ``torch.compile`` or ``module.compile()``."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def is_of_torch(module: nn.Module) -> bool:
    """Return whether the forward of ``module`` is torch's own, such as that of ``nn.TransformerEncoderLayer``."""
    written_in: str | None = getattr(getattr(type(module), "forward", None), "__module__", None)
    return written_in is not None and written_in.startswith("torch.")


_compiled_here: WeakKeyDictionary[nn.Module, ref[object]] = WeakKeyDictionary()
"""Modules that :func:`compile_in_place` has compiled, and their compiled calls; a call holds its module."""


def compile_in_place(
    module: nn.Module, options: Mapping[str, object], *, unless: Callable[[Iterable[object]], bool] | None = None
) -> None:
    """Compile ``module`` as ``module.compile()`` does, so that :func:`undo_compile` can undo it.

    A call for whose arguments ``unless`` is True runs uncompiled.

    The compiler begins at no function of torch itself, and so takes only pieces of torch's own classes, such as
    ``nn.Sequential`` and ``nn.TransformerEncoderLayer``. For them it begins here.
    """
    if is_of_torch(module):
        vars(module)["_call_impl"] = MethodType(_call_of_torch, module)
    module.compile(**options)
    vars(module).pop("_call_impl", None)
    compiled: Any = module._compiled_call_impl
    if compiled is None:  # somebody has switched `Module.compile` off
        return

    def call(*args: object, **kwargs: object) -> object:
        assert unless is not None
        return (module._call_impl if unless((*args, *kwargs.values())) else compiled)(*args, **kwargs)

    if unless is not None:
        module._compiled_call_impl = call
    _compiled_here[module] = ref(module._compiled_call_impl)


def _call_of_torch(module: nn.Module, *args: object, **kwargs: object) -> object:
    return nn.Module._call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]


def undo_compile(module: nn.Module) -> None:
    """Undo :func:`compile_in_place`; what the user has compiled stays compiled."""
    call = _compiled_here.pop(module, None)
    if call is not None and call() is module._compiled_call_impl:
        module._compiled_call_impl = None


def without_compiled_wrapper(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile(module)`` was called with, or ``model`` itself."""
    module: nn.Module = getattr(model, "_orig_mod", model)
    return module


def remove_forward_hook(module: nn.Module, function: Callable[..., object]) -> None:
    """Remove every forward hook of ``module`` that is ``function``."""
    for key in [key for key, hook in module._forward_hooks.items() if hook is function]:
        del module._forward_hooks[key]


def is_batch_or_instance_norm(module: nn.Module) -> bool:
    """Return whether ``module`` is a batch or instance norm, which refuses float32 beside half-precision weights."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor that has a gradient and of which ``tensor`` is a view, or ``tensor`` itself.

    A write in place to a view gives the view another place in the graph, where its hooks do not run.
    """
    base = tensor._base
    return tensor if base is None or not base.requires_grad else base


class TracedModule(nn.Module):
    """A module that learns when ``torch.jit.trace`` calls it; any other call costs nothing."""

    def check_trace(self) -> None:
        """Raise if the module cannot be traced."""

    def _slow_forward(self, *args: object, **kwargs: object) -> Any:
        self.check_trace()
        return super()._slow_forward(*args, **kwargs)  # type: ignore[no-untyped-call]
