"""Private names of transformers (4.57 to 5) that this package uses. transformers is imported inside the functions."""

import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from types import FrameType
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_lowprec.extras import missing, replaced

CHECKPOINT_FUNCTION: Final = "_gradient_checkpointing_func"
"""Where a module keeps its checkpoint function (since 4.35) after ``gradient_checkpointing_enable()``."""
_LOSS: Final = "_loss_function"
"""Where a model keeps the loss that was set by ``model.loss_function = ...`` (since 4.46)."""
_NAMES: Final = (
    f"transformers.modeling_utils.PreTrainedModel.{_LOSS[1:]}",
    f"transformers.modeling_utils.PreTrainedModel().{CHECKPOINT_FUNCTION}",
    "transformers.models.mixtral.modeling_mixtral.MixtralExperts._apply_gate",
    "transformers.pytorch_utils.Conv1D().nf",
    "transformers.models.falcon.modeling_falcon.FalconLinear.forward",
    "transformers.integrations.moe.use_experts_implementation()._is_expert_parallel",
    "transformers.configuration_utils.PreTrainedConfig._experts_implementation",
    "transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS.register",
    "transformers.distributed.expert_parallel.apply_expert_parallelism()._is_hooked",
    "transformers.modeling_utils.PreTrainedModel._keep_in_fp32_modules",
    "transformers.modeling_utils.PreTrainedModel._keep_in_fp32_modules_strict",
    "transformers.masking_utils.find_packed_sequence_indices",
)
_LOADING: Final = "transformers.core_model_loading"
_PUBLISHING: Final = (
    f"{_LOADING}.revert_weight_conversion",
    f"{_LOADING}.apply_converters",
    f"{_LOADING}.WeightConverter.reverse_transform",
    f"{_LOADING}.PrefixChange",
    "transformers.conversion_mapping.get_model_conversion_mapping",
)
_OURS: Final = "lightning_lowprec"
"""The name under which transformers finds the forward that a precision gave to stacked experts."""


def moved() -> list[str]:
    """Return the private names that the installed transformers no longer has; [] without transformers."""
    if find_spec("transformers") is None:
        return []
    return missing((*_NAMES, *_PUBLISHING) if _converts() else _NAMES)


def is_conv1d(cls: type) -> bool:
    """Return whether a class is transformers' ``Conv1D``, a Linear whose weight is [in, out]; imports nothing."""
    return (cls.__module__, cls.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def is_falcon_linear(cls: type) -> bool:
    """Return whether a class is Falcon's Linear, whose own forward computes what a Linear's does; imports nothing."""
    return (cls.__module__, cls.__qualname__) == ("transformers.models.falcon.modeling_falcon", "FalconLinear")


def experts_implementation(experts: object) -> str | None:
    """Return how a model multiplies stacked experts: ``"grouped_mm"``, ``"eager"``, ...; None: eager."""
    config = getattr(experts, "config", None)
    config = config.own_config if isinstance(config, _Redirected) else config
    found: str | None = getattr(config, "_experts_implementation", None)
    return found


@final
class _Redirected:
    """The config of one module of stacked experts, with another implementation; models share the config itself."""

    _experts_implementation = _OURS

    def __init__(self, own_config: object) -> None:
        self.own_config = own_config

    def __getattr__(self, name: str) -> object:
        if name == "own_config":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.own_config, name)

    def __reduce__(self) -> tuple[object, ...]:
        return _redirected, (self.own_config,)


def _redirected(config: object) -> _Redirected:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_OURS, _forward_of_class)
    return _Redirected(config)


def _forward_of_class(experts: Any, *args: object, **kwargs: object) -> Any:
    if not isinstance(experts.config, _Redirected):  # the name was written into a config: the class would call this
        raise ValueError(
            f"`experts_implementation={_OURS!r}` is not valid: a precision sets this name, for the experts that the"
            " precision computes. Use 'grouped_mm'."
        )
    return type(experts).forward(experts, *args, **kwargs)


def redirect(experts: Any) -> None:
    """Let a forward that was replaced on the instance reach the forward of the class that the module has now.

    Expert parallelism of transformers (and accelerate's hooks) put a function around the bound forward of the class
    that the module had then. That forward asks the module's config for an implementation.
    """
    if "forward" in vars(experts) and not isinstance(experts.config, _Redirected):
        experts.config = _redirected(experts.config)


def undo_redirect(experts: Any) -> None:
    """Undo :func:`redirect`."""
    if isinstance(experts.config, _Redirected):
        experts.config = experts.config.own_config


@contextmanager
def own_implementation(experts: Any) -> Iterator[None]:
    """Let stacked experts run the implementation of their own config."""
    config = experts.config
    undo_redirect(experts)
    try:
        yield
    finally:
        experts.config = config


def is_expert_parallel(experts: object) -> bool:
    """Return whether some of the experts of a token may be on another rank."""
    return bool(getattr(experts, "_is_expert_parallel", False))


def has_parallel_forward(module: nn.Module) -> bool:
    """Return whether transformers has put a function for its parallelism around the forward of a module."""
    return bool(vars(module).get("_is_hooked"))


def activate(experts: Any, doubled: Tensor) -> Tensor:
    """Apply the activation of stacked experts to the output of their first GEMM: [P, 2I] -> [P, I]."""
    activated: Tensor = experts._apply_gate(doubled)
    return activated


def declares_float32(model: object, *, strict: bool) -> Callable[[str], bool]:
    """Return whether ``model`` declares a tensor of this fqn float32, as transformers 5 searches its patterns.

    ``strict``: ask the list for both half precisions, else the list for fp16.
    """
    declared = getattr(model, f"_keep_in_fp32_modules{'_strict' if strict else ''}", None) or ()
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in declared]
    return lambda fqn: any(pattern.search(fqn) for pattern in patterns)


# ---- the loss of causal language models


def is_model(module: nn.Module) -> bool:
    """Return whether ``module`` is a model of transformers; imports nothing."""
    bases = ((cls.__module__, cls.__name__) for cls in type(module).__mro__)
    return ("transformers.modeling_utils", "PreTrainedModel") in bases


def causal_loss(*args: Any, **kwargs: Any) -> Tensor:
    """Return the loss of causal language models; the arguments are those of ``model.loss_function``."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss: Tensor = ForCausalLMLoss(*args, **kwargs)
    return loss


def has_causal_loss(model: Any) -> bool:
    """Return whether the loss of ``model`` is that of causal language models, and nobody has set another one."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return _LOSS not in vars(model) and model.loss_function is ForCausalLMLoss


def set_loss(model: Any, loss: Callable[..., Tensor] | None) -> None:
    """Let ``model`` compute its loss by ``loss``; None: by its own again."""
    if loss is not None:
        model.loss_function = loss
    else:
        vars(model).pop(_LOSS, None)


def loss_of(model: object) -> Any:
    """Return what :func:`set_loss` has set, or None."""
    return vars(model).get(_LOSS)


@contextmanager
def as_with_values() -> Iterator[None]:
    """Let models take tensors without values for those of a training step, not for those of a compiler."""
    if find_spec("transformers") is None:
        yield
        return
    from transformers import masking_utils
    from transformers.utils import import_utils

    answers = ((import_utils, "is_fake_tensor", False), (masking_utils, "find_packed_sequence_indices", None))
    with ExitStack() as stack:
        for module, name, answer in answers:
            if hasattr(module, name):
                stack.enter_context(replaced(module, name, lambda *args, _answer=answer, **kwargs: _answer))
        yield


# ---- the names of tensors in published checkpoints, which are not always those of the model (transformers 5 and on)

# A mixture's stacked experts are published as one Linear per expert, for example. The functions used have no
# underscore, but no documentation either; transformers 4 publishes the model's own names.


class Group(NamedTuple):
    """Tensors of a model that become tensors of a published checkpoint together."""

    names: tuple[str, ...]
    is_renamed: bool
    """Whether there is one tensor, whose values stay."""


def _converts() -> bool:
    return find_spec("transformers") is not None and find_spec(_LOADING) is not None


def published_groups(model: nn.Module, names: Iterable[str]) -> list[Group]:
    """Return which tensors are published together, in the order of ``names``."""
    converters = _converters(model)
    members_of: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        key, is_renamed = name, True
        if converters:
            from transformers.core_model_loading import apply_converters

            target, pattern = apply_converters(name, converters)
            key, is_renamed = (name, True) if pattern is None else (target, False)
        members_of.setdefault((key, is_renamed), []).append(name)
    return [Group(tuple(members), is_renamed) for (_, is_renamed), members in members_of.items()]


def as_published(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of one group as they are published; on the meta device too."""
    if not is_model(model) or not _converts():
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))  # type: ignore[arg-type]


def _converters(model: Any) -> list[Any]:
    """Return the conversions of several tensors, or of their values, from a model to a published checkpoint."""
    if not is_model(model) or not _converts():
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    conversions = getattr(model, "_weight_conversions", None)  # of `from_pretrained`
    if conversions is None:
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in mapping if not isinstance(conversion, PrefixChange)]
    reversed_ones = (conversion.reverse_transform() for conversion in reversed(conversions))
    return [conversion for conversion in reversed_ones if isinstance(conversion, WeightConverter)]


# ---- what models do by default in training, and compiled blocks pay for


def train_without_cache(module: nn.Module) -> bool:
    """Let models of transformers in ``module`` make no cache unless a call asks for one; return whether there are any.

    By default they make one in training too. It reads the index of each block: a compiler then makes code for each
    block, and from torch's limit on (8) runs all others uncompiled. Evaluation without labels makes one as before.

    Without a cache a model searches ``position_ids`` for packed sequences, and the host waits for the answer. Here it
    searches only where the model would search that is left alone, in ``position_ids`` that its caller gives.
    """
    models = [model for model in module.modules() if is_model(model)]
    for model in models:
        positions = {name: at for at, name in enumerate(inspect.signature(model.forward).parameters)}
        if "use_cache" in positions and not any(_hooks(model)):
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


def has_cache(values: Iterable[object]) -> bool:
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
    without_cache: nn.Module | None
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


def _end_call(model: nn.Module, args: object, output: object) -> None:
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
    if model.training and torch.is_grad_enabled():
        asked = asked and not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return bool(asked)
