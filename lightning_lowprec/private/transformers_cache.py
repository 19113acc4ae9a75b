"""Keep models of transformers (4.57 to 5) from what they do by default in training, and compiled blocks pay for.

A cache of keys and values makes every block another one to a compiler. Without a cache a model searches
``position_ids`` for packed sequences, and the host waits for what the GPU finds.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_lowprec.private.transformers import is_model


def train_without_cache(module: nn.Module) -> bool:
    """Let models of transformers in ``module`` make no cache unless a call asks for one; return whether there are any.

    By default they make one in training too. It reads the index of each block: a compiler then makes code for each
    block, and from torch's limit on (8) runs all others uncompiled. Evaluation without labels makes one as before.

    Without a cache a model searches ``position_ids`` for packed sequences, and the host waits for the answer. Here it
    searches only where the model would search that is left alone, in ``position_ids`` that its caller gives.
    """
    models = [model for model in module.modules() if is_model(model)]
    for model in models:
        names = list(inspect.signature(model.forward).parameters)
        if "use_cache" in names and not any(_hooks(model)):
            positions: dict[str, int] = {
                name: names.index(name) for name in ("use_cache", "position_ids") if name in names
            }
            model.register_forward_pre_hook(partial(_begin_call, positions), with_kwargs=True)
            model.register_forward_hook(_end_call, always_call=True)
    if models:
        _search_where_needed()
    return bool(models)


def with_own_cache(module: nn.Module) -> None:
    """Undo :func:`train_without_cache` for a module, of a copy too."""
    before, after = _hooks(module)
    for key in before:
        del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    for key in after:
        del module._forward_hooks[key], module._forward_hooks_always_called[key]


def has_cache(values: Iterable[Any]) -> bool:
    """Return whether one of the arguments of a block is a cache of keys and values."""
    classes = (cls for value in values if not isinstance(value, Tensor) for cls in type(value).__mro__)
    return any(cls.__module__ == "transformers.cache_utils" for cls in classes)


def _hooks(module: nn.Module) -> tuple[list[int], list[int]]:
    before = module._forward_pre_hooks.items()
    after = module._forward_hooks.items()
    return (
        [key for key, hook in before if isinstance(hook, partial) and hook.func is _begin_call],
        [key for key, hook in after if hook is _end_call],
    )


class _Call(NamedTuple):
    """A call of a model that runs now."""

    model: nn.Module
    has_positions: bool
    """Whether the caller gave ``position_ids``; a model that makes them itself counts from 0: one sequence."""
    without_cache: Any
    """The model, this one or one around it, that was kept from making a cache; or None."""
    frame: FrameType | None
    """Torch's frame that calls the model; None where a compiler traces the call."""


@final
class _Calls(threading.local):
    """The calls of models that run on this thread, and those that a compiler traces on it; the innermost one last."""

    def __init__(self) -> None:
        self.running: list[_Call] = []
        self.traced: list[_Call] = []


_CALLS: Final = _Calls()


def _calls() -> list[_Call]:
    if torch.compiler.is_compiling():
        return _CALLS.traced
    _CALLS.running[:] = [call for call in _CALLS.running if _is_running(call.frame)]  # Ctrl-C skips `_end_call`
    return _CALLS.running


def _is_running(called: FrameType | None) -> bool:
    """Return whether a frame is on this thread's stack. To read its locals would keep tensors of the forward alive."""
    frame = inspect.currentframe()
    while frame is not None and frame is not called:
        frame = frame.f_back
    return frame is not None


def _begin_call(positions: Mapping[str, int], model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    given = any(kwargs.get(name) is not None for name in ("use_cache", "past_key_values"))
    given = given or len(args) > positions["use_cache"] or has_cache((*args, *kwargs.values()))
    makes_none = not given and (model.training or kwargs.get("labels") is not None)
    at = positions.get("position_ids", len(args))
    has_positions = kwargs.get("position_ids") is not None or (len(args) > at and args[at] is not None)
    calls = [call for call in _calls() if call.model is not model]
    around = calls[-1].without_cache if calls else None
    frame = None if torch.compiler.is_compiling() else sys._getframe(1)
    _calls()[:] = [*calls, _Call(model, has_positions, model if makes_none else around, frame)]
    return (args, {**kwargs, "use_cache": False}) if makes_none else None


def _end_call(model: nn.Module, args: Any, output: Any) -> None:
    calls = _calls()
    if calls and calls[-1].model is model:
        calls.pop()


def _search_where_needed() -> None:
    """Put a function around transformers' search for packed sequences, once per process."""
    from transformers import masking_utils

    search = getattr(masking_utils, "find_packed_sequence_indices", None)  # a version without it searches nowhere
    if search is not None and getattr(search, "func", None) is not _packed_sequences:
        masking_utils.find_packed_sequence_indices = partial(_packed_sequences, search)


def _packed_sequences(search: Callable[[Tensor], Any], position_ids: Tensor) -> Any:
    calls = _calls()
    is_one_sequence = calls and (not calls[-1].has_positions or _would_make_cache(calls[-1].without_cache))
    return None if is_one_sequence else search(position_ids)


def _would_make_cache(model: Any) -> bool:
    """Return whether a model that is kept from making a cache would make one, and so search for no packed sequences."""
    if model is None:
        return False
    asked = getattr(model.config, "use_cache", None)
    if asked is None:
        asked = getattr(model.config.get_text_config(), "use_cache", False)
    checkpoints = model.training and torch.is_grad_enabled()
    return bool(asked) and not (
        checkpoints and any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    )
