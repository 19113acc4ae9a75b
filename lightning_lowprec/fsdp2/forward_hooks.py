"""Hooks at the beginning and at the end of each computation of a sharded model: its forward, or a step of the Trainer.

At the beginning, the scales of FP8 weights are refreshed by one reduction. Inference mode is replaced by ``no_grad``:
FSDP2 makes tensors that live on (gathered weights, streams), and a tensor made in inference mode can never train.

At the end of a computation without gradients, all gathered weights are freed. FSDP2 keeps the root gathered for a
backward pass, which does not come here: ``parameters()`` would show copies, and an EMA callback or a checkpoint would
write to the copies and change nothing.

In manual optimization a ``training_step`` holds whole backward passes and steps. It sees the shards and their
gradients: user code clips, edits and averages after a step. So the root's weights are freed after each backward pass
and step, and are gathered again only if a module that needs them runs in the rest of ``training_step``, as in a GAN.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lightning_lowprec.fsdp2.fp8_gather import GatherScales
from lightning_lowprec.private.fsdp2 import prepare_backward_from, run_as_root, without_root_hooks
from lightning_lowprec.private.torch import is_in_backward, tree_map_only
from lightning_lowprec.private.torch_modules import before_compiled_call

SHARDS_IN_COMPUTATION: Final = (
    "fsdp2: in manual optimization `training_step` sees the parameters as shards, so that their gradients can be read,"
    " clipped and edited. Compute with a parameter inside the `forward` of the module that owns the parameter, or"
    " between `self.unshard()` and `self.reshard()`."
)


def install_hooks(
    model: nn.Module,
    scales: GatherScales | None,
    output_dtype: torch.dtype | None,
    methods: tuple[str, ...],
) -> ForwardHooks:
    """Install the hooks on a sharded model, and on ``methods`` that compute without calling ``model(...)``."""
    hooks = ForwardHooks(model, scales, output_dtype, may_be_manual=bool(methods))
    # the first hook runs before FSDP2's own, the second one after it
    model.register_forward_pre_hook(lambda module, args, kwargs: hooks.begin(), prepend=True, with_kwargs=True)
    model.register_forward_hook(lambda module, args, kwargs, out: hooks.end(out), with_kwargs=True, always_call=True)
    for name in ("toggle_optimizer", "untoggle_optimizer"):  # a LightningModule's
        if hasattr(model, name):
            setattr(model, name, _followed_by(getattr(model, name), lambda *args, **kwargs: hooks.copy_flags()))
    model.zero_grad = _followed_by(model.zero_grad, hooks.zero_grad)  # type: ignore[method-assign]
    for name in methods:
        method = getattr(model, name)
        register_fsdp_forward_method(model, name)
        gathered = getattr(model, name)
        # the Trainer reads which arguments to pass: `wraps` shows it the signature of the user's method
        setattr(model, name, wraps(method)(_with_hooks(gathered, partial(run_as_root, model, method), hooks)))
    return hooks


def _followed_by(method: Callable[..., None], function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of a model: gathered weights may be shown, and the ``function`` does the same to the shards."""

    @wraps(method)
    def with_function(*args: Any, **kwargs: Any) -> None:
        method(*args, **kwargs)
        function(*args, **kwargs)

    return with_function


def _with_hooks(
    gathered: Callable[..., Any], sharded: Callable[[Any, Any], Any], hooks: ForwardHooks
) -> Callable[..., Any]:
    """Return a function that runs ``gathered(...)``, or ``sharded(args, kwargs)`` if user code is to see the shards."""

    def with_hooks(*args: Any, **kwargs: Any) -> Any:
        hooks.begin()
        try:
            if not hooks.shards_come_first():
                return gathered(*args, **kwargs)
            hooks.show_shards()
            return sharded(args, kwargs)
        except RuntimeError as error:
            if "got mixed torch.Tensor and DTensor" in str(error):
                error.add_note(SHARDS_IN_COMPUTATION)
            raise
        finally:
            hooks.end()

    return with_hooks


@final
class ForwardHooks:
    """The computations of one model that are under way. They may be nested: ``training_step`` calls the forward."""

    def __init__(
        self, model: nn.Module, scales: GatherScales | None, output_dtype: torch.dtype | None, *, may_be_manual: bool
    ) -> None:
        self._model = weakref.ref(model)
        self._output_dtype = output_dtype
        self._may_be_manual = may_be_manual  # a LightningModule in a Trainer
        self._scales = scales
        self._open: list[ExitStack] = []
        self._shards = dict(model.named_parameters())
        self._awaited: list[Any] = []  # hooks that gather the root's weights at their next use

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> None:
        """Prepare for a computation."""
        stack = ExitStack()
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if self._open:
            model: Any = self._model()
            stack.enter_context(without_root_hooks(model))
        self._open.append(stack)
        if self._scales is not None:
            self._scales.refresh()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, output: Any = None) -> Any:
        """Clean up after a computation, with or without an error; return ``output``, cast as FSDP2 would cast it."""
        stack = self._open.pop()
        if not self._open:
            self._stop_waiting()
            if self._is_manual() or not torch.is_grad_enabled():  # no backward pass follows
                reshard(self._model())
        else:
            if self.shards_come_first() and not is_in_backward():  # a checkpoint recomputes in a backward pass
                self.show_shards()
            if (dtype := self._output_dtype) is not None:
                output = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, output)
        stack.close()
        return output

    def _is_manual(self) -> bool:
        model: Any = self._model()
        return self._may_be_manual and torch.is_grad_enabled() and not model.automatic_optimization

    def shards_come_first(self) -> bool:
        """Return whether a ``training_step`` begins with shards.

        In automatic optimization, it begins with gathered weights. So it does in manual optimization, until the first
        backward pass, if the LightningModule owns parameters itself: its code computes with them.
        """
        model: Any = self._model()
        return self._is_manual() and next(model.parameters(recurse=False), None) is None

    def copy_flags(self) -> None:
        """Copy ``requires_grad`` from the shards to gathered weights; FSDP2 copies it only when it gathers."""
        model = self._model()
        for fqn, p in () if model is None else model.named_parameters():
            if p is not self._shards[fqn]:
                p.requires_grad_(self._shards[fqn].requires_grad)

    def before_backward(self, loss: Tensor) -> None:
        """Let FSDP2 prepare a backward pass within a computation when the gradient of ``loss`` arrives.

        By itself it waits for the gradient of the computation's output, which does not exist yet. Without this the
        gradients of the root are lost if no block, and no call of the model, is between its weights and the loss.
        """
        model = self._model()
        if self._open and model is not None:
            prepare_backward_from(model, loss)

    def show_shards(self) -> None:
        """Free the root's weights, after a backward pass or a step within a computation (manual optimization).

        They are gathered again when the rest of ``training_step`` calls a module that uses them.
        """
        model: Any = self._model()
        if not self._open or model is None:
            return
        model.reshard()
        if not self._awaited:
            for module in dict.fromkeys(_modules_of_root(model)):  # once, where two modules share a third
                self._awaited.append(module.register_forward_pre_hook(self._gather_root))
                self._awaited += before_compiled_call(module, self._gather_root)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gather_root(self, *_: Any) -> None:
        self._stop_waiting()
        if self._scales is not None:
            self._scales.refresh()
        model: Any = self._model()
        model.unshard()

    def _stop_waiting(self) -> None:
        awaited, self._awaited = self._awaited, []
        for handle in awaited:
            handle.remove()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of the shards, or set them to zero."""
        for p in self._shards.values():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()


def _modules_of_root(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules below the root whose weights no inner group gathers."""
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield child
            yield from _modules_of_root(child)


def reshard(model: nn.Module | None) -> None:
    """Free all gathered weights, so that ``parameters()`` shows the shards."""
    for module in () if model is None else model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
