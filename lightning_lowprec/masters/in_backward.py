"""Update a parameter during the backward pass, soon after its gradient is complete, and free the gradient.

So there are never gradients of the whole model, and float32 values of one parameter at a time. On a GPU gradients wait
until they have ``WAITING`` numbers together, so that a launch steps several parameters. ``optimizer.step()``
then counts the step, and updates what has a gradient all the same: parameters without masters, and gradients that other
code has assigned.

Under DDP gradients are averaged after the hooks of their parameters, so that parameters are updated in the step there:
as in the backward pass, but the gradients of the whole model exist. FSDP2 runs the hooks after its reduce-scatter.
With several optimizers, too, parameters are updated in the step.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_lowprec.masters import kernel_step
from lightning_lowprec.masters.config import ACCUMULATES, IN_THE_STEP, MasterConfig
from lightning_lowprec.masters.deferred import norms
from lightning_lowprec.masters.registry import registry_of
from lightning_lowprec.numerics.parameters import chunks, multiply, parameters_of, together
from lightning_lowprec.private.torch import after_backward
from lightning_lowprec.private.torch_optimizers import refuse_copies

CLIP_NORM: Final = "clip_norm"  # in param_groups[0]: by what norm gradients are clipped during the backward pass
LAST_NORM: Final = "last_norm"  # in param_groups[0] of a state dict: the norm of the last step
_HANDLE: Final = "lowprec_update"  # an attribute of parameters: how to remove their hook
WAITING: Final = 64 * 2**20
"""Numbers of the gradients that wait for a launch: at most 128 MB in bf16, and the gradient that comes last."""


@final
class BackwardUpdates:
    """The hooks of the parameters of one optimizer, which has masters, each in a store of its own."""

    def __init__(self, optimizer: Optimizer, config: MasterConfig) -> None:
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self._clip_tensor, self._folds = config.clip_tensor, config.update == "moments"
        self._updated: set[int] = set()  # id(parameter), since the last step; or the moments have gradients
        self._uses = 0  # of gradients, since the last step
        self._waiting: list[Tensor] = []  # parameters with complete gradients
        self._norm: Tensor | None = None  # of the gradients since the last step, where they are clipped
        self._last_norm: Tensor | None = None  # of the step before
        self._rates: list[Any] = []  # the learning rates of the updates since the last step
        self._warned = False
        self.in_step = False  # whether gradients wait for the step, because there are other optimizers

    def _params(self) -> list[Tensor]:
        """Return the parameters that have masters; the optimizer exists where its own methods call."""
        optimizer: Any = self._optimizer()
        return [param for param, _ in optimizer._masters.pairs()]

    def hooked(self) -> list[Tensor]:
        """Return the parameters that have a hook of this object."""
        return [param for param in self._params() if (vars(param).get(_HANDLE) or (None,))[0] is self]

    def watch(self) -> None:
        """Hook the parameters that have masters; a hook of another optimizer is removed."""
        hooked = set(map(id, self.hooked()))
        for param in self._params():
            if id(param) not in hooked:
                forget_updates([param])
                if param.requires_grad:
                    hook: Any = param.register_post_accumulate_grad_hook
                    setattr(param, _HANDLE, _Owner((self, hook(self._on_gradient))))

    def finish(self) -> None:
        """Begin a new step; warn once if a learning rate was set after the updates that it was meant for."""
        self._updated.clear()
        self._uses = 0
        self._waiting.clear()
        self._norm, self._last_norm = None, self._norm
        optimizer = self._optimizer()
        rates, self._rates = self._rates, []
        if rates and not self._warned and any(a != b for a, b in zip(rates, _rates(optimizer), strict=False)):
            self._warned = True
            warnings.warn(
                "A learning rate was changed between `backward` and `optimizer.step()`. `update='backward'` has updated"
                " the parameters during `backward`, so the change takes effect one step late. Set learning rates before"
                " `backward`, or after `optimizer.step()` as schedulers do.",
                stacklevel=2,
            )

    @torch.no_grad()
    def update_left(self) -> None:
        """Update parameters whose moments have their gradients; under DDP, those that are clipped one by one."""
        folded = [param for param in self._params() if id(param) in self._updated] if self._folds else []
        for params in chunks(folded, WAITING):
            for param in params:
                param.grad = torch.zeros_like(param)  # the step decays moments that have all of the gradients
            self._optimizer().update_early(params, 1.0)
        for param in self._params() if self._clip_tensor is not None else ():
            if param.grad is not None:
                self._optimizer().update_early([param], self._factor([param.grad]))

    @torch.no_grad()
    def _on_gradient(self, param: Tensor) -> None:
        optimizer = self._optimizer()
        # DDP writes the gradient after its hooks, in a group of one process too
        by_ddp = not isinstance(param, DTensor) and dist.is_available() and dist.is_initialized()
        if optimizer is None or param.grad is None or by_ddp or self.in_step:
            return
        if id(param) in self._updated and not self._folds:
            raise RuntimeError(
                f"a second backward pass reached a parameter of shape {tuple(param.shape)} before `optimizer.step()`,"
                " and the first one has updated it already: `update='backward'` cannot add up the gradients of several"
                f" backward passes. Add the losses and run one backward pass, or use {ACCUMULATES}. If the parameter is"
                " in several blocks under activation checkpointing, use `use_reentrant=False`: the other way runs one"
                " backward pass per block."
            )
        if not self._updated and not self._folds:
            self._rates = _rates(optimizer)
        self._updated.add(id(param))
        kind = param.device_mesh.device_type if isinstance(param, DTensor) else param.device.type
        if kind != param.device.type:  # offloaded: torch 2.11 copies the gradient to the CPU while the hook runs
            torch.get_device_module(kind).current_stream().synchronize()
        if self._clip_tensor is not None or param.device.type not in kernel_step.DEVICES:
            self._use([param])
            return
        if not self._waiting:
            after_backward(self._update_waiting)
        self._waiting.append(param)
        if sum(map(_share, self._waiting)) >= WAITING:
            self._update_waiting()

    @torch.no_grad()
    def _update_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._use([param for param in waiting if param.grad is not None])

    def _use(self, params: Sequence[Tensor]) -> None:
        optimizer, self._uses = self._optimizer(), self._uses + 1
        if optimizer is not None:
            factor = self._factor([param.grad for param in params if param.grad is not None])
            optimizer.update_early(params, factor, fold=self._uses if self._folds else None)

    def _factor(self, grads: Sequence[Tensor]) -> float | Tensor:
        """Return what clipping multiplies gradients by."""
        max_norm = self._optimizer().param_groups[0].get(CLIP_NORM)
        limit = max_norm if self._clip_tensor is None else self._clip_tensor
        if limit is None or not grads:
            return 1.0
        values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        norm = together(norms(values, 2.0))
        if self._clip_tensor is None:
            norm = self._norm = norm if self._norm is None else torch.hypot(norm, self._norm)
            if self._last_norm is not None and self._updated:
                norm = torch.maximum(norm, self._last_norm.to(norm.device).nan_to_num(0.0, posinf=0.0))
        return torch.clamp(limit / (norm + 1e-6), max=1.0)

    # ---- clipping by the norm of all gradients, as far as it is known

    @property
    def clips_all(self) -> bool:
        """Whether gradients may be clipped by the norm of all: they are neither clipped one by one nor accumulated."""
        return self._clip_tensor is None and not self._folds

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients that are left, and those of later backward passes; return the norm since the last step.

        A gradient is clipped by the norm of the last step, or by that of the gradients so far if this is larger. If no
        parameter has been updated yet (under DDP), the gradients are clipped by their norm.
        """
        optimizer = self._optimizer()
        if CLIP_NORM not in optimizer.param_groups[0]:
            rank_zero_info(
                "Gradients are clipped by the norm of the last step, or by the norm so far if it is larger:"
                " `update='backward'` uses each gradient before the norm of all is known. The first step is not"
                " clipped. `bf16-8bit` clips by the norm of the same step."
            )
        optimizer.param_groups[0][CLIP_NORM] = float(max_norm)
        left = [param.grad for param in parameters_of(optimizer) if param.grad is not None]
        multiply(left, self._factor(left))
        return torch.zeros(()) if self._norm is None else self._norm

    def save_norm(self, group: dict[str, Any]) -> None:
        """Write the last norm into a parameter group, for a checkpoint."""
        group.pop(LAST_NORM, None)
        if self._last_norm is not None:
            group[LAST_NORM] = float(self._last_norm)

    def load_norm(self, group: dict[str, Any]) -> None:
        """Take the last norm of a checkpoint, if there is one."""
        self._last_norm = torch.tensor(group[LAST_NORM]) if LAST_NORM in group else None


def forget_updates(params: Iterable[Tensor]) -> None:
    """Remove the hooks by which any optimizer updates ``params`` during the backward pass."""
    for param in params:
        owner = vars(param).pop(_HANDLE, None)
        if owner is not None:
            owner[1].remove()


def wait_for_steps(optimizer: Optimizer, others: Iterable[Optimizer]) -> None:
    """Leave gradients to the steps if a backward pass may reach parameters of several optimizers, as in a GAN.

    An optimizer that takes the place of another one is alone.
    """
    members = {id(p) for p in parameters_of(optimizer)}
    for other in others:
        updates = vars(other).get("_updates")
        if other is optimizer or updates is None or not updates.hooked():
            continue
        if any(id(p) not in members for p in parameters_of(other)):
            if not updates.in_step:
                rank_zero_info(
                    "Several optimizers: weights are updated in the step, not during the backward pass, because a"
                    " backward pass may reach the weights of an optimizer that does not step: 2 bytes per parameter"
                    " more. To train models one after another, use a new Fabric and a new plugin for each."
                )
            updates.in_step = vars(optimizer)["_updates"].in_step = True


def refuse_together(optimizer: Optimizer) -> ValueError:
    """Return the error for an optimizer that cannot step one parameter at a time."""
    return ValueError(
        f"`update='backward'` steps one parameter at a time, and {type(optimizer).__name__} must see all of them at"
        " once (step hooks, arguments of `step`, and classes of your own that do not say"
        f" `independent_parameters = True`). Use another optimizer, or {IN_THE_STEP}."
    )


def _share(param: Tensor) -> int:
    """Return the numbers of a parameter per rank, the same on every rank: norms are computed over all ranks."""
    return param.numel() // (param.device_mesh.size() if isinstance(param, DTensor) else 1)


def _rates(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), float)]


@final
class _Owner(tuple[Any, ...]):
    """What hooks a parameter; no part of its copies and pickles."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def refuse_clipping(optimizer: Optimizer) -> None:
    """Raise if gradients are gone or copied before they could be clipped: RuntimeError or TypeError."""
    refuse_copies(optimizer, "clipping, because it copies each gradient before the norm of all is known")
    registry = registry_of(optimizer)
    if registry is not None and registry.config.update != "step":
        raise RuntimeError(clipping_refused("gradients were to be clipped"))


def clipping_refused(what: str) -> str:
    """Return why gradients cannot be clipped, and what to do."""
    return (
        f"{what}, and `update='backward'` has used and freed them when they could be clipped. Use {IN_THE_STEP}. Or"
        " remove this clipping, and let `master_weights=MasterConfig(form='remainder', moments='8bit',"
        " update='backward', clip_tensor=1.0)` clip the gradient of each parameter."
    )
