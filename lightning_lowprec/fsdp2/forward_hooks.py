"""Hooks at the beginning and at the end of each computation of a sharded model: its forward, or a step of the Trainer.

At the beginning, the scales of FP8 weights are refreshed by one reduction. Inference mode is replaced by ``no_grad``:
FSDP2 makes tensors that live on (gathered weights, streams), and a tensor made in inference mode can never train.

At the end of a computation without gradients, all gathered weights are freed. FSDP2 keeps the root gathered for a
backward pass, which does not come here. Until the next one ``parameters()`` would show gathered copies. An EMA callback
that restores its weights after validation would then write to the copies and change nothing, and so would a checkpoint
that is loaded then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lightning_lowprec.fsdp2.fp8_gather import GatherScales
from lightning_lowprec.private.torch import keep_in_forward, prepare_backward_from


def install_hooks(model: nn.Module, scales: GatherScales | None, methods: tuple[str, ...] = ()) -> ForwardHooks:
    """Install the hooks on a sharded model, and on ``methods`` that compute without calling ``model(...)``."""
    hooks = ForwardHooks(model, scales)
    # the first hook runs before FSDP2's own, the second one after it
    model.register_forward_pre_hook(lambda module, args, kwargs: hooks.begin(), prepend=True, with_kwargs=True)
    model.register_forward_hook(lambda module, args, kwargs, output: hooks.end(), with_kwargs=True, always_call=True)
    for name in ("toggle_optimizer", "untoggle_optimizer"):  # a LightningModule's
        if hasattr(model, name):
            setattr(model, name, _with_copied_flags(getattr(model, name), hooks))
    for name in methods:
        method = getattr(model, name)
        setattr(model, name, _as_one_forward(method, model))
        register_fsdp_forward_method(model, name)
        # the Trainer reads which arguments to pass: `wraps` shows it the signature of the user's method
        setattr(model, name, wraps(method)(_with_hooks(getattr(model, name), hooks)))
    return hooks


def _with_copied_flags(method: Callable[..., Any], hooks: ForwardHooks) -> Callable[..., Any]:
    """Wrap a method that changes ``requires_grad`` of the shards, so that gathered weights change too."""

    @wraps(method)
    def with_copied_flags(*args: Any, **kwargs: Any) -> None:
        method(*args, **kwargs)
        hooks.copy_flags()

    return with_copied_flags


def _as_one_forward(method: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """Wrap a method that may call ``model(...)``, so that FSDP2 takes the whole method for one forward pass.

    Otherwise FSDP2 believes that the pass is over when the inner call returns. It then frees the root's weights when
    the method returns, whatever ``reshard_after_forward`` says, and gathers them twice per step. Without gradients that
    is right, because no backward pass would free the weights.
    """

    def as_one_forward(*args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        if torch.is_grad_enabled():
            keep_in_forward(model)
        return output

    return as_one_forward


def _with_hooks(method: Callable[..., Any], hooks: ForwardHooks) -> Callable[..., Any]:
    def with_hooks(*args: Any, **kwargs: Any) -> Any:
        hooks.begin()
        try:
            return method(*args, **kwargs)
        finally:
            hooks.end()

    return with_hooks


@final
class ForwardHooks:
    """The computations of one model that are under way. They may be nested: ``training_step`` calls the forward."""

    def __init__(self, model: nn.Module, scales: GatherScales | None) -> None:
        self._model = weakref.ref(model)
        self._scales = scales
        self._open: list[ExitStack] = []
        self._shards = dict(model.named_parameters())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> None:
        """Prepare for a computation."""
        stack = ExitStack()
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        self._open.append(stack)
        if self._scales is not None:
            self._scales.refresh()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """Clean up after a computation, with or without an error."""
        stack = self._open.pop()
        if not self._open and not torch.is_grad_enabled():
            reshard(self._model())
        stack.close()

    def copy_flags(self) -> None:
        """Copy ``requires_grad`` from the shards to gathered weights; FSDP2 copies it only when it gathers."""
        model = self._model()
        for fqn, p in () if model is None else model.named_parameters():
            if p is not self._shards[fqn]:
                p.requires_grad_(self._shards[fqn].requires_grad)

    def before_backward(self, loss: Tensor) -> None:
        """Prepare a backward pass within a computation (manual optimization).

        FSDP2 waits for the gradient of the computation's output, which does not exist yet, so let FSDP2 wait for the
        gradient of ``loss``. Otherwise the root's gradients are lost if no block, and no call of the model itself, is
        between the root's weights and the loss.
        """
        model = self._model()
        if self._open and model is not None:
            prepare_backward_from(model, loss)

    def gather_again(self) -> None:
        """Gather the root again, after a backward pass or a step within a computation (manual optimization).

        The backward pass has freed the root's weights, or the step has changed them. The rest of ``training_step`` may
        use the root's layers directly.
        """
        model: Any = self._model()
        if self._open and model is not None:
            if self._scales is not None:
                self._scales.refresh()
            model.reshard()
            model.unshard()


def reshard(model: nn.Module | None) -> None:
    """Free all gathered weights, so that ``parameters()`` shows the shards."""
    for module in () if model is None else model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
