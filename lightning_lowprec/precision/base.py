"""One precision plugin for Trainer and Fabric; how the two differ stands in :mod:`~lightning_lowprec.precision.host`."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision as TrainerPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.hardware import default_device
from lightning_lowprec.masters.half_weights import HalfWeights
from lightning_lowprec.masters.optimizer import expose_master_grads, main_params
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.precision.host import cast_floating, device_of, in_trainer, shown_as, trainer_of
from lightning_lowprec.precision.loss_scale import LossScale, LossScaler
from lightning_lowprec.precision.loss_scale_choice import check_optimizer
from lightning_lowprec.precision.refusals import refuse_uncast, refuse_unfit
from lightning_lowprec.precision.scale_state import SCALER_STATE, foreign_states, load_loss_scale, log_loss_scale
from lightning_lowprec.precision.unscaling import unscale_to_clip, zero_if_nonfinite
from lightning_lowprec.references import alive


class LowPrecision(TrainerPrecision, ABC):
    """Base of every precision plugin of this package: autocast, loss scaling, the differences Trainer / Fabric.

    A plugin learns its device in one of three ways, the first that applies: ``bind_device`` (called by the names in
    ``precision=``), the Trainer of the module, or the module's own parameters, at the first forward if they may still
    move. ``_settle`` then runs once per module, with the device known.
    """

    precision: str = "lowprec"  # type: ignore[assignment]  # Lightning's Literal cannot be extended
    keeps_codes: bool = False
    """Whether weights become codes with scales (MS-AMP), which other precisions do not know."""
    shards_codes: bool = False  # whether FSDP2 can shard these

    def __init__(self, loss_scale: LossScale | None, masters: HalfWeights | None = None) -> None:
        self.scaler: LossScaler | None = None if loss_scale is None else LossScaler(loss_scale)
        self.masters = masters
        self._device: torch.device | None = None
        self._pending: list[weakref.ref[Module]] = []
        self._modules: list[weakref.ref[Module]] = []
        self._unchecked: list[weakref.ref[Module]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._in_trainer = False
        self._will_train = True
        self._half_weights = False
        self._sharded: weakref.WeakSet[Module] | None = None  # None: not under FSDP2

    # ---- what a plugin defines

    @property
    @abstractmethod
    def autocast_dtype(self) -> torch.dtype:
        """The dtype of everything that runs neither in FP8 nor in float32."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype whose peak rate bounds this precision: what Lightning's ThroughputMonitor compares with."""
        return self.autocast_dtype

    def refusal(self, device: torch.device) -> str | None:
        """Why this precision cannot run on ``device`` and what would help, or None if it can."""
        return None

    def emulates(self, device: torch.device) -> bool:
        """Whether it would run on ``device`` on the arithmetic of another format: slowly, for tests."""
        return False

    @abstractmethod
    def how(self, device: torch.device) -> str:
        """How it runs on ``device``, in one line."""

    def _settle(self, module: Module, device: torch.device) -> None:
        """Prepare a module for ``device``, in place; runs once per set-up, as soon as the device is known."""

    # ---- device

    def bind_device(self, device: torch.device) -> None:
        """Say where the modules will run before they are moved there; no device is touched by it."""
        self._device = device

    @override
    def convert_module(self, module: Module) -> Module:
        """Prepare ``module`` in place: now if its device is known, else at the first forward."""
        trainer = trainer_of(module)
        if trainer is not None and trainer.precision_plugin is not self:  # left from an earlier fit; this is Fabric
            trainer = None
        self._in_trainer = trainer is not None
        # evaluated before fit, weights stay float32 (autocast rounds them the same way), and fit's masters lose nothing
        self._will_train = trainer is None or trainer.state.fn == TrainerFn.FITTING
        if trainer is not None:
            self._device = trainer.strategy.root_device
        if module in (self._sharded or ()) or refuse_unfit(module, self.precision, self.keeps_codes):
            return module
        self._pending.append(weakref.ref(module))
        may_still_move = default_device().type != "cpu" and device_of(module).type == "cpu"
        if self._device is not None or not may_still_move:
            self._settle_pending()
        elif self.masters is not None and self._sharded is None:  # before DDP makes buckets of their dtype
            self.masters.cast(module, self.autocast_dtype)
        return module

    def _settle_pending(self) -> None:
        pending, self._pending = self._pending, []
        for module in alive(pending):
            self._device = self._device or device_of(module)
            self._settle(module, self._device)
            if self.masters is not None and self._will_train and self._sharded is None:
                self.masters.cast(module, self.autocast_dtype)
            self._half_weights = self.masters is not None and any(p.dtype in HALF_DTYPES for p in module.parameters())
            self._modules = [weakref.ref(m) for m in (*alive(self._modules), module)]
            self._unchecked.append(weakref.ref(module))
        if self.masters is not None:
            for optimizer in alive(self._optimizers):
                self.masters.add_masters(optimizer)
        self._device = self._device or default_device()

    def _known_device(self) -> torch.device:
        if self._pending or self._device is None:
            self._settle_pending()
        assert self._device is not None
        return self._device

    # ---- FSDP2

    def bind_shards(self) -> None:
        """Our FSDP2 strategy runs this: float32 masters are its float32 shards, and other forms wait for shards."""
        self._sharded = weakref.WeakSet() if self._sharded is None else self._sharded
        self.masters = None if self.masters is None else self.masters.under_fsdp2()

    def cast_shards(self, module: Module) -> None:
        """``module`` is sharded, in float32: cast the shards if the weights are half precision."""
        self._sharded = weakref.WeakSet([*(self._sharded or ()), module])
        if self.masters is not None:
            self.masters.cast(module, self.autocast_dtype)
            self._half_weights = True

    # ---- optimizers

    def see_optimizer(self, optimizer: Optimizer) -> None:
        """Fabric, by the names in ``precision=``: an optimizer is set up, before its first step."""
        self._optimizers.append(weakref.ref(optimizer))
        if self.scaler is not None:
            self.scaler.watch(optimizer)
        if self.masters is not None:
            self.masters.add_masters(optimizer)

    def see_module(self, module: Module) -> None:
        """A module as the strategy wrapped it: Fabric by the names in ``precision=``, the Trainer by ``connect``."""
        if self.masters is not None:
            self.masters.gradients.reduce_ddp(module)

    def _before_first_step(self, optimizer: Optimizer) -> None:
        """Fabric, after every set-up of modules."""
        if self._optimizers:
            self._check_optimizers([*alive(self._optimizers), optimizer])
        if self.masters is not None:
            refuse_uncast(self._sharded, self.precision)
            self.masters.gradients.check_reduced()
            self.masters.add_masters(optimizer)  # without the names, this is the first that is seen of it
            self.masters.drop_originals()
        self._unchecked = []

    def _check_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Raise if what was converted will not train; runs once per set-up, with every optimizer that is known."""

    @override
    def connect(self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Trainer: see the wrapped model, and all optimizers before their first step."""
        self.see_module(model)
        for optimizer in optimizers:
            if self.scaler is not None:
                self.scaler.watch(optimizer)
            if self.masters is not None:
                self.masters.add_masters(optimizer)
        if self.masters is not None:
            self.masters.drop_originals()
        self._check_optimizers(optimizers)
        self._unchecked = []
        return super().connect(model, optimizers, lr_schedulers)

    # ---- forward

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast on the module's device, cached as Lightning does it: in Fabric, not in the Trainer."""
        device = self._known_device()
        return torch.autocast(device.type, dtype=self.autocast_dtype, cache_enabled=not self._in_trainer)

    @override
    def convert_input(self, data: Any) -> Any:
        """Floating-point tensors to the autocast dtype, in Fabric and where the weights are half precision.

        In the Trainer, over float32 weights, batches stay as they are: as with Lightning's own mixed precision.
        """
        if self._in_trainer and not self._half_weights:
            return data
        self._known_device()
        return cast_floating(data, self.autocast_dtype)

    @override
    def convert_output(self, data: Any) -> Any:
        """Floating-point tensors to the default dtype (Fabric only calls this)."""
        return cast_floating(data, torch.get_default_dtype())

    # ---- backward

    @override
    @shown_as(FabricPrecision.pre_backward)
    def pre_backward(self, tensor: Tensor, module: Module | None) -> Tensor:
        """Trainer: scale the loss, then run its hooks."""
        if not in_trainer(module):
            return tensor
        return super().pre_backward(self._scaled(tensor), module)

    @property
    def backward(self) -> Callable[..., None]:
        """``backward(tensor, module, *args, **kwargs)``; Fabric sees an override only where it does something."""
        accumulates = self.masters is not None and self.masters.gradients.wraps_backward
        return self._backward_plain if self.scaler is None and not accumulates else self._backward_own

    @shown_as(FabricPrecision.backward)
    def _backward_plain(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        parent: Any = TrainerPrecision if in_trainer(model) else FabricPrecision
        parent.backward(self, tensor, model, *args, **kwargs)

    def _backward_own(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        scaled = tensor if in_trainer(model) else self._scaled(tensor)
        with nullcontext() if self.masters is None else self.masters.gradients.during_backward():
            self._backward_plain(scaled, model, *args, **kwargs)

    @override
    @shown_as(FabricPrecision.post_backward)
    def post_backward(self, tensor: Tensor, module: Module | None) -> Tensor:
        """Trainer: run its hooks."""
        if not in_trainer(module):
            return tensor
        return super().post_backward(tensor, module)

    def _scaled(self, tensor: Tensor) -> Tensor:
        return tensor if self.scaler is None else self.scaler.scale_loss(tensor)

    # ---- step

    @override
    def optimizer_step(
        self,
        optimizer: Any,
        model: LightningModule | None = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step; with loss scaling: run the closure, unscale, let the Trainer clip, step unless not finite."""
        if self._unchecked:
            self._before_first_step(optimizer)
        if self.scaler is not None:
            return self._scaled_step(self.scaler, optimizer, model, closure, kwargs)
        if model is not None and closure is not None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        return optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)

    def _scaled_step(
        self,
        scaler: LossScaler,
        optimizer: Any,
        model: LightningModule | None,
        closure: Callable[[], Any] | None,
        kwargs: dict[str, Any],
    ) -> Any:
        check_optimizer(self.precision, optimizer)
        result = None if closure is None else closure()
        if model is None:
            scaler.step(optimizer, **kwargs)
            return result
        skipped = result is None and model.automatic_optimization  # training_step returned None: no gradients
        if not skipped:
            scaler.unscale(optimizer)
        with expose_master_grads(optimizer):
            self._after_closure(model, optimizer)
        if skipped:
            return result
        output = scaler.step(optimizer, **kwargs)
        log_loss_scale(scaler, model.trainer)
        return output

    @override
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Called by ``fabric.clip_gradients``; gradients of a step that will be skipped become zero.

        Fabric's default ``error_if_nonfinite=True`` would otherwise turn an overflow into an exception.
        """
        unscale_to_clip(self.scaler, optimizer)
        zero_if_nonfinite(self.scaler, optimizer)

    @override
    def main_params(self, optimizer: Optimizer) -> Iterator[Tensor]:  # type: ignore[override]  # masters are tensors
        """What the optimizer updates, for clipping and for looking at gradients: float32 masters where there are."""
        return main_params(optimizer)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip unscaled gradients, also in manual optimization, also of fused optimizers."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if clip_val > 0:
            unscale_to_clip(self.scaler, optimizer)
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    # ---- state

    @override
    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings; ``loss_scale`` is there if the loss is scaled."""
        return {} if self.scaler is None else {SCALER_STATE: self.scaler.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loss scale if both runs scale the loss; a scale that has no use here is dropped, and logged."""
        load_loss_scale(self.scaler, state_dict, self.precision)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Trainer: take what another plugin left, so that a checkpoint of any precision resumes under any other."""
        for state in foreign_states(checkpoint, type(self).__qualname__):
            self.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but modules and optimizers, which stay in their process."""
        return {**self.__dict__, "_pending": [], "_modules": [], "_unchecked": [], "_optimizers": [], "_sharded": None}

    def __str__(self) -> str:
        """Shown in Lightning's errors, so it names the package that this plugin is made for."""
        return f"{type(self).__name__}({self.precision!r}, a plugin for lightning.pytorch and lightning.fabric)"
