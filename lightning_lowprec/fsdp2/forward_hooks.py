"""What happens each time a sharded model begins to compute, by its forward or by a step of the Trainer, and ends.

Before: the scales of FP8 weights are made good, with one reduction. And inference mode is left for ``no_grad``: FSDP2
makes tensors that live on (gathered weights, streams of lazy set-up), and one made in inference mode can never train.

After, without gradients: what is still gathered is freed. FSDP2 keeps the root gathered for a backward pass that will
not come, and until the next one ``parameters()`` would show copies: an EMA callback that puts its weights back after
validation, or a checkpoint that is loaded then, would write to those and change nothing.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

if TYPE_CHECKING:
    from lightning_lowprec.fsdp2.fp8_gather import GatherScales


TOGGLES = ("toggle_optimizer", "untoggle_optimizer")
"""Methods of a LightningModule that change ``requires_grad``."""


def install_hooks(model: nn.Module, scales: GatherScales | None, methods: tuple[str, ...] = ()) -> ForwardHooks:
    """Set this up on a sharded model, for its forward and for ``methods`` (of which the ones it has become forwards).

    Args:
        model: the root, sharded.
        scales: of its FP8 weights, if it gathers any.
        methods: names of methods that compute without calling ``model(...)``, such as ``training_step``.
    """
    hooks = ForwardHooks(model, scales)
    for name in TOGGLES:
        if callable(getattr(model, name, None)):
            setattr(model, name, MethodType(_then_followed(getattr(model, name), hooks), model))
    # in front of FSDP2's own hook, and behind it
    model.register_forward_pre_hook(lambda module, args, kwargs: hooks.begin(), prepend=True, with_kwargs=True)
    model.register_forward_hook(lambda module, args, kwargs, output: hooks.end(), with_kwargs=True, always_call=True)
    for name in methods:
        if callable(getattr(model, name, None)):
            signature = inspect.signature(getattr(model, name))
            setattr(model, name, MethodType(_one_forward(getattr(model, name)), model))
            register_fsdp_forward_method(model, name)
            with_hooks = _with_hooks(getattr(model, name), hooks)
            _show_as(with_hooks, signature)
            setattr(model, name, MethodType(with_hooks, model))
    return hooks


def _then_followed(method: Callable[..., Any], hooks: ForwardHooks) -> Callable[..., Any]:
    """``method``, which changes ``requires_grad`` of the shards; weights that are gathered just now follow."""

    @wraps(method)
    def then_followed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        hooks.follow_flags()
        return output

    return then_followed


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


class ForwardHooks:
    """The computations of one model that are under way; they may be nested, as ``training_step`` calls the forward."""

    def __init__(self, model: nn.Module, scales: GatherScales | None) -> None:
        self._model = weakref.ref(model)
        self._scales = scales
        self._open: list[ExitStack] = []
        self._shards = dict(model.named_parameters())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> None:
        """One begins."""
        stack = ExitStack()
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        self._open.append(stack)
        if self._scales is not None:
            self._scales.refresh()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """One has ended, with or without an error."""
        stack = self._open.pop()
        if not self._open and not torch.is_grad_enabled():
            reshard(self._model())
        stack.close()

    def follow_flags(self) -> None:
        """``requires_grad`` of shards has changed; FSDP2 copies it to gathered weights when it gathers them."""
        model = self._model()
        for fqn, p in () if model is None else model.named_parameters():
            if p is not self._shards[fqn]:
                p.requires_grad_(self._shards[fqn].requires_grad)

    def before_backward(self, loss: Tensor) -> None:
        """If one is under way: FSDP2 waits for the gradient of its output, which is not made yet, so wait for this.

        Otherwise the root's gradients are lost when no block, and no call of the model itself, is behind the loss.
        """
        model: Any = self._model()
        if self._open and model is not None:
            model._get_fsdp_state()._register_pre_backward_hook(loss)

    def gather_again(self) -> None:
        """If one is under way: a backward pass or a step within it has freed or changed the root's weights.

        In manual optimization; what follows in the same ``training_step`` may use the root's layers directly.
        """
        model: Any = self._model()
        if self._open and model is not None:
            if self._scales is not None:
                self._scales.refresh()
            model.reshard()
            model.unshard()


def reshard(model: nn.Module | None) -> None:
    """Free whatever is gathered, so that ``parameters()`` shows the shards."""
    for module in () if model is None else model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _with_hooks(method: Callable[..., Any], hooks: ForwardHooks) -> Callable[..., Any]:
    @wraps(method)
    def with_hooks(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hooks.begin()
        try:
            return method(*args, **kwargs)
        finally:
            hooks.end()

    return with_hooks
