"""What happens each time a sharded model begins to compute, by its forward or by a step of the Trainer.

The scales of FP8 weights are made good first, with one reduction. And inference mode is left for ``no_grad``: FSDP2
makes tensors that live on (gathered weights, streams of lazy set-up), and a tensor made in inference mode can never
train.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

if TYPE_CHECKING:
    from lightning_lowprec.distributed.fp8_weight import GatherScales


def guard(model: nn.Module, scales: GatherScales | None, methods: tuple[str, ...] = ()) -> None:
    """Set this up on a sharded model, for its forward and for ``methods`` (of which the ones it has become forwards).

    Args:
        model: the root, sharded.
        scales: of its FP8 weights, if it gathers any.
        methods: names of methods that compute without calling ``model(...)``, such as ``training_step``.
    """
    open_stacks: list[ExitStack] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        open_stacks.append(_enter(scales))

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        open_stacks.pop().close()

    model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)  # in front of FSDP2's own
    model.register_forward_hook(leave, with_kwargs=True, always_call=True)
    for name in methods:
        if callable(getattr(model, name, None)):
            signature = inspect.signature(getattr(model, name))
            setattr(model, name, MethodType(_one_forward(getattr(model, name)), model))
            register_fsdp_forward_method(model, name)
            entered = _entered(getattr(model, name), scales)
            _show_as(entered, signature)
            setattr(model, name, MethodType(entered, model))


def _one_forward(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, which may call ``self(...)``, as one forward pass.

    FSDP2 believes that the pass is over when the inner call returns, and frees the root's weights when the outer one
    does, whatever ``reshard_after_forward`` says: they would be gathered twice per step. (In evaluation that is as
    well: no backward pass would free them.)
    """

    @wraps(method)
    def one_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        if not torch.is_grad_enabled():
            return output
        state = cast(FSDPModule, self)._get_fsdp_state()
        # torch 2.11 has one group per module, later ones a list
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is not None:
                group._training_state = TrainingState.FORWARD
        return output

    return one_forward


def _show_as(function: Any, signature: inspect.Signature) -> None:
    """Give ``function``, to be bound, the signature of the user's bound method: the Trainer reads what it may pass."""
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    function.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])
    del function.__wrapped__  # inspect would follow it, and take off one argument for each bound method on the way


def _entered(method: Callable[..., Any], scales: GatherScales | None) -> Callable[..., Any]:
    @wraps(method)
    def entered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _enter(scales):
            return method(*args, **kwargs)

    return entered


def _enter(scales: GatherScales | None) -> ExitStack:
    stack = ExitStack()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
    if scales is not None:
        scales.refresh()
    return stack
