"""Hooks at the beginning and at the end of each computation of a sharded model: its forward, or a step of the Trainer.

At the beginning, the scales of FP8 weights are refreshed by one reduction. Inference mode is replaced by ``no_grad``:
FSDP2 makes tensors that live on (gathered weights, streams), and a tensor made in inference mode can never train.

At the end of a computation without gradients, all gathered weights are freed. FSDP2 keeps the root gathered for a
backward pass, which does not come here: ``parameters()`` would show copies, and an EMA callback or a checkpoint would
write to the copies and change nothing.

In manual optimization a ``training_step`` holds whole backward passes and steps, so it is no computation of FSDP2, as
under Lightning's ModelParallelStrategy: its calls of the module itself are, and their backward passes. All gathered
weights are freed after each step and at the end of ``training_step``.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lightning_lowprec.fsdp2.fp8_gather import GatherScales
from lightning_lowprec.private.fsdp2 import gathered_parameters, unreduced_gradient, without_root_hooks
from lightning_lowprec.private.torch import tree_map_only

OUTSIDE_OF_FORWARD: Final = (
    "fsdp2: in manual optimization a parameter was used outside of the module's own forward: compute by `self(...)`,"
    " call `self.unshard()` before a penalty on weights that is added to such a loss, or use strategy='ddp'."
)
NOT_REDUCED: Final = (
    "fsdp2: the gradient of a parameter is not in the shard that the optimizer updates, because it did not arrive in"
    " the backward pass of `self(...)`: compute the whole loss by `self(...)`, or use strategy='ddp'."
)


def install_hooks(
    model: nn.Module,
    scales: GatherScales | None,
    output_dtype: torch.dtype | None,
    methods: tuple[str, ...],
) -> None:
    """Install the hooks on a sharded model, and on ``methods`` that compute without calling ``model(...)``."""
    hooks = ForwardHooks(model, scales, output_dtype)
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
        gathered = _with_hooks(getattr(model, name), hooks)
        if name == "training_step":
            gathered = _unless_manual(gathered, method, hooks.model)
        # the Trainer reads which arguments to pass: `wraps` shows it the signature of the user's method
        setattr(model, name, wraps(method)(gathered))


def _followed_by(method: Callable[..., None], function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of a model: gathered weights may be shown, and the ``function`` does the same to the shards."""

    @wraps(method)
    def with_function(*args: object, **kwargs: object) -> None:
        method(*args, **kwargs)
        function(*args, **kwargs)

    return with_function


def _with_hooks(method: Callable[..., object], hooks: "ForwardHooks") -> Callable[..., object]:
    def with_hooks(*args: object, **kwargs: object) -> object:
        hooks.begin()
        try:
            return method(*args, **kwargs)
        finally:
            hooks.end()

    return with_hooks


def _unless_manual(
    gathered: Callable[..., object], method: Callable[..., object], model: weakref.ref[nn.Module]
) -> Callable[..., object]:
    """Return a function that runs ``gathered``, or in manual optimization the user's ``method``, which sees shards."""

    def training_step(*args: object, **kwargs: object) -> object:
        module: Any = model()
        if module.automatic_optimization:
            return gathered(*args, **kwargs)
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if "got mixed torch.Tensor and DTensor" in str(error):
                raise RuntimeError(OUTSIDE_OF_FORWARD) from error
            raise
        finally:
            reshard(module)

    return training_step


@final
class ForwardHooks:
    """The computations of one model that are under way. They may be nested: ``training_step`` calls the forward."""

    def __init__(self, model: nn.Module, scales: GatherScales | None, output_dtype: torch.dtype | None) -> None:
        self.model = weakref.ref(model)
        self._output_dtype = output_dtype
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
        if self._open:
            model: Any = self.model()
            stack.enter_context(without_root_hooks(model))
        self._open.append(stack)
        if self._scales is not None:
            self._scales.refresh()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, output: object = None) -> object:
        """Clean up after a computation, with or without an error; return ``output``, cast as FSDP2 would cast it."""
        stack = self._open.pop()
        if not self._open:
            if not torch.is_grad_enabled():  # no backward pass follows
                reshard(self.model())
        elif (dtype := self._output_dtype) is not None:
            output = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, output)
        stack.close()
        return output

    def copy_flags(self) -> None:
        """Copy ``requires_grad`` from the shards to gathered weights; FSDP2 copies it only when it gathers."""
        model = self.model()
        for fqn, p in () if model is None else model.named_parameters():
            if p is not self._shards[fqn]:
                p.requires_grad_(self._shards[fqn].requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of the shards, or set them to zero."""
        for p in self._shards.values():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()


def check_reduced(model: nn.Module, params: Iterable[nn.Parameter]) -> None:
    """Raise RuntimeError if a gradient of one of ``params`` arrived outside of a forward's backward: FSDP2 keeps it."""
    stepped = set(params)
    for module in model.modules():
        for record in gathered_parameters(module) if isinstance(module, FSDPModule) else ():
            if record.sharded_param in stepped and unreduced_gradient(record) is not None:
                raise RuntimeError(NOT_REDUCED)


def reshard(model: nn.Module | None) -> None:
    """Free all gathered weights, so that ``parameters()`` shows the shards."""
    for module in () if model is None else model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
