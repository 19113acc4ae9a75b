"""The base of every precision plugin, for Trainer and Fabric alike.

A plugin is a thin layer of Lightning's hooks over four parts, each in a separate file:

* :mod:`~lightning_lowprec.precision.set_up`: the modules and optimizers that were set up, and their checks;
* :mod:`~lightning_lowprec.precision.step`: what happens at a training step, from the loss to the weights;
* :mod:`~lightning_lowprec.precision.loss_scale`: the scale of the loss, skipped steps, and what checkpoints hold;
* :mod:`~lightning_lowprec.precision.host`: the differences between Trainer and Fabric.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.conversion import backends, declared, module_dtypes
from lightning_lowprec.conversion.experts import follow_autocast
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.masters import step as masters_step
from lightning_lowprec.masters.kept_float32 import kept_float32
from lightning_lowprec.masters.optimizer import main_params
from lightning_lowprec.masters.weights import HalfWeights
from lightning_lowprec.messages import info
from lightning_lowprec.numerics.fp8_matrices import FastAccum
from lightning_lowprec.numerics.parameters import WeakList, disable_foreach
from lightning_lowprec.numerics.tensor_cores import Emulation
from lightning_lowprec.other_stacks import NEMO, refuse_foreign
from lightning_lowprec.precision import loss_scale, plain, refusals, set_up, step
from lightning_lowprec.precision.host import Engine, callbacks_of, cast_floating, shown_as, trainer_of
from lightning_lowprec.precision.loss_scale import LossScaler
from lightning_lowprec.precision.options import BASE_DTYPES, Base, RunOptions, TrainingOptions
from lightning_lowprec.private import either
from lightning_lowprec.private.lightning import EitherPrecision
from lightning_lowprec.private.torch_inductor import store_float8_right
from lightning_lowprec.runs_where import RecipeKey


class LowPrecision(EitherPrecision, ABC):
    """Base of every precision plugin: autocast, loss scaling, half-precision weights, Trainer and Fabric.

    Without ``scaler`` neither the loss is scaled nor a step skipped; without ``masters`` weights are float32.
    """

    precision: str = "lowprec"  # type: ignore[assignment]  # Lightning's Literal cannot be extended
    backend: ClassVar[str | None] = None
    """The name of the plugin's entry in :mod:`~lightning_lowprec.conversion.backends`; None: no layers convert."""
    plan: Plan | None = None  # of the module that was set up last: converted layers, kept layers, reasons
    not_sharded: str | None = None
    """The option that does not go with sharded weights, such as ``"fp8_params=True"``; None: no option."""
    format: ClassVar[str] = "FP8"  # of the layers that convert, in words
    base: Base
    emulate: Emulation | None = False  # the user's choice; None: on a CPU only
    keeps_codes: bool = False  # whether weights become codes with scales (MS-AMP), which other precisions do not know
    keeps_float32_shards: bool = False  # whether FSDP2's float32 shards take the place of masters
    fast_accum: FastAccum = "forward"  # the GEMMs in FP8 that may add up with fewer bits
    shards_codes: bool = False  # whether FSDP2 can shard these codes
    engine: Engine | None = None
    """Runs backward passes and steps, and has the masters and the loss scale, in place of the plugin (DeepSpeed)."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which FSDP2 reduces gradients, unless the strategy's ``reduce_dtype`` says so; None: float32."""

    def __init__(
        self, scaler: LossScaler | None, masters: HalfWeights | None = None, options: RunOptions | None = None
    ) -> None:
        options = TrainingOptions() if options is None else options
        self.keep_fp32 = options.keep_fp32 if isinstance(options, TrainingOptions) else ()
        self.scaler = scaler
        self.masters = masters
        self._casts_batch = masters is not None and masters.cast_inputs  # a strategy may take the masters away
        if masters is not None:
            masters.keep_fp32 = self.keep_fp32
        self.weights = options.float32_weights(masters)
        self.head = options.head
        self.plain_after_fit = options.plain_after_fit
        self.modules = set_up.Modules()
        self.optimizers: WeakList[Optimizer] = WeakList()  # of Fabric, one by one; the Trainer hands over all at once
        self.reshard: Callable[[Module], None] | None = None
        self.after_fit = plain.AfterFit()
        self._in_trainer = False
        self._will_train = True

    # ---- the methods that a plugin defines

    @property
    def autocast_dtype(self) -> torch.dtype:
        """The dtype of every operation that runs neither in FP8 nor in float32: the option ``base``."""
        return BASE_DTYPES[self.base]

    @abstractmethod
    def how(self, device: torch.device) -> str:
        """Return one line: the kernels or the emulation by which the precision runs on ``device``."""

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped, because a gradient was not finite."""
        counts = self.scaler or self.engine
        return 0 if counts is None else counts.skipped_steps

    @property
    def peak_rate_dtype(self) -> torch.dtype:
        """The dtype whose peak rate bounds this precision, for Lightning's ThroughputMonitor."""
        return self.autocast_dtype

    @property
    def hardware_recipe(self) -> RecipeKey | None:
        """The row of the table of what runs where (:mod:`lightning_lowprec.runs_where`); None: the table has none."""
        return None

    def refusal(self, device: torch.device) -> str | None:
        """Return why this precision cannot run on ``device``, and the remedy; None if it can."""
        return None

    def emulates(self, device: torch.device) -> Emulation:
        """Return how ``device`` emulates the precision by the arithmetic of another format: slow, for tests."""
        return device.type == "cpu" if self.emulate is None else self.emulate

    def gathers(self, options: object) -> str | None:
        """Return why FSDP2 cannot gather the weights as float8 by ``ShardOptions``, as the end of a sentence."""
        return f"`precision={self.precision!r}` has no FP8 weights"

    def engine_refusal(self, engine: Engine) -> str | None:
        """Return why this precision does not run by an engine, as the end of a sentence; None if it does."""
        return None

    def sharded_identity(self) -> tuple[object, ...]:
        """Return everything about this precision that sharding builds into a model."""
        return (self.precision,)

    def _prepare(self, module: Module, device: torch.device) -> None:
        """Convert a module for ``device``, in place; runs once per set-up, as soon as the device is known."""

    def _converted_layers(self, module: Module) -> Iterable[Module]:
        """Return the layers of the plugin's backend: their trainable weights must be in an optimizer."""
        return () if self.backend is None else filter(backends.get(self.backend).owns, module.modules())

    # ---- set-up of modules

    def bind_device(self, device: torch.device) -> None:
        """Set the device that the modules will run on, before they are moved; touches no device."""
        self.modules.bind(device)

    @override
    def convert_module(self, module: Module) -> Module:
        """Prepare ``module`` in place: at once if the device is known, else at the first forward."""
        trainer = trainer_of(module)
        if trainer is not None and trainer.precision_plugin is not self:  # from an earlier fit; now Fabric runs it
            trainer = None
        self._in_trainer = trainer is not None
        self._will_train = trainer is None or trainer.state.fn == either.TrainerFn.FITTING
        if trainer is not None:
            self.modules.bind(trainer.strategy.root_device)
        if module in (self.modules.sharded or ()):
            return module
        refusals.refuse_sharded(module, self.precision)
        if self.keep_fp32:
            kept_float32(module, torch.bfloat16, self.keep_fp32)  # raises for a name that matches nothing
        self.after_fit.begin(self, module, trainer)
        if self.modules.add(module):
            self._prepare_waiting()
        else:  # before DDP makes buckets of the parameters' dtypes
            self._set_dtypes(module)
        self.after_fit.keep_changed()
        return module

    def _prepare_waiting(self) -> None:
        for module, device in self.modules.take_waiting():
            refusals.check_runs(self, device)
            store_float8_right()
            if self._will_train or self.backend is not None:
                plain.forget(module)  # how a fit before this one rounded weights
            backends.revert_all(module, except_for=self.backend)
            if self.masters is None:
                self._set_dtypes(module)
            self._prepare(module, device)
            set_up.set_up_heads(self, module, device)
            follow_autocast(module)
            if device.type == "cpu" and (self.masters, self.engine, self.modules.sharded) != (None, None, None):
                module_dtypes.take_float32_on_cpu(module)  # weights are in half precision, or the gathered ones are
            if self.masters is not None:
                self._set_dtypes(module)
        for optimizer in self.optimizers:
            self._prepare_weights_of(optimizer)

    def _set_dtypes(self, module: Module) -> None:
        """Cast a module to half precision, to evaluate too; or its half-precision weights that train to float32."""
        if self.masters is not None:
            if self.modules.sharded is None:
                self._cast_to_half(module)
        elif self.weights is not None and self._will_train:
            finetunes = either.both(either.trainer_callbacks.BaseFinetuning)
            unfreezes = any(isinstance(callback, finetunes) for callback in callbacks_of(module))
            if (change := self.weights.make(module, frozen_too=unfreezes)) is not None:
                remedy = "" if self.keeps_float32_shards else " `weights='keep'` trains them in half precision."
                info(f"{self.precision}: {change}.{remedy}")

    def _cast_to_half(self, module: Module) -> None:
        assert self.masters is not None
        rounded = self.masters.cast(module, self.autocast_dtype, trains=self._will_train)
        if self._will_train and rounded:
            info(
                f"{self.precision}: {rounded} trainable parameters of {type(module).__name__} were half precision"
                " already, so their float32 values start from rounded values. Load the model in float32"
                " (`dtype=torch.float32` of transformers' `from_pretrained`) to keep them exact."
            )

    def _known_device(self) -> torch.device:
        if not self.modules.ready:
            self._prepare_waiting()
        assert self.modules.device is not None
        return self.modules.device

    # ---- set-up under FSDP2

    def bind_shards(self, reshard: Callable[[Module], None]) -> None:
        """Prepare for FSDP2. Its float32 shards are the float32 masters; other forms of masters wait for the shards.

        ``reshard`` frees the gathered weights of a module, so that ``parameters()`` shows the shards.
        """
        self.modules.note_sharded()
        self.reshard = reshard
        masters = None if self.masters is None else self.masters.under_fsdp2()
        self.keeps_float32_shards |= self.masters is not None and masters is None
        self.masters = masters

    def cast_shards(self, module: Module) -> None:
        """Cast the float32 shards of a sharded ``module`` if the precision has half-precision weights."""
        self.modules.note_sharded(module)
        if self.weights is not None:
            self.weights.note_sharded(module)
        if self.masters is not None:
            self._cast_to_half(module)

    def bind_engine(self, engine: Engine) -> None:
        """Leave backward passes, steps, half-precision weights, masters and the loss scale to an engine."""
        if self.keep_fp32:
            raise ValueError(
                f"`keep_fp32={list(self.keep_fp32)!r}` is not possible under {engine.name}, which casts every weight."
                " Use `strategy='fsdp2'`, or leave it out."
            )
        self.engine = engine
        self.scaler = self.masters = self.weights = None

    # ---- set-up of optimizers

    def see_optimizer(self, optimizer: Optimizer) -> None:
        """Prepare an optimizer before its first step; called in Fabric if ``precision=`` has one of our names."""
        self.optimizers.add(optimizer)
        self._prepare_optimizer(optimizer)

    def see_module(self, module: Module) -> None:
        """Note a module that DDP has wrapped."""
        self.modules.replicated |= isinstance(module, DistributedDataParallel)

    def _prepare_optimizer(self, optimizer: Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.watch(optimizer)
        self._prepare_weights_of(optimizer)

    def _prepare_weights_of(self, optimizer: Optimizer) -> None:
        """Let an optimizer follow the dtypes of its parameters, and take over what another precision left in it."""
        backends.revert_optimizer(optimizer, except_for=self.backend)
        if disable_foreach(optimizer):
            name = type(optimizer).__name__
            info(f"{name} runs without foreach: some of its parameters are DTensors, or of another mesh.")
        if self.masters is not None:
            self.masters.add_masters(optimizer)
        elif self.weights is not None:
            self.weights.follow(optimizer)

    @override
    def connect(
        self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[object]
    ) -> tuple[Module, list[Optimizer], list[object]]:
        """Trainer: prepare the wrapped model, and all optimizers before their first step."""
        if (trainer := trainer_of(model)) is not None:  # FSDP2 converts at the first set-up alone
            self._in_trainer, self._will_train = True, trainer.state.fn == either.TrainerFn.FITTING
        if self.masters is not None or self.backend is not None:
            refusals.refuse_graph(model, self.precision)
        self.see_module(model)
        self.after_fit.optimizers = WeakList(optimizers) if self.masters is None else list(optimizers)
        if self.engine is None:  # else DeepSpeed's optimizers are not known yet
            set_up.before_training(self, model, optimizers, will_train=self._will_train)
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def teardown(self) -> None:
        """Trainer: hand the model back, or log a line if the strategy leaves it sharded."""
        super().teardown()
        self.after_fit.end(self)

    # ---- forward

    @override
    def forward_context(self) -> AbstractContextManager[object]:
        """Return autocast on the module's device; casts are cached in Fabric, not in the Trainer, as in Lightning."""
        device = self._known_device()
        if self.engine is not None:  # enters autocast itself
            return torch.autocast(device.type, enabled=False)
        if self.modules.unsettled and self.optimizers and torch.is_grad_enabled():
            set_up.settle_weights(self)
        half = self.masters is not None or self.modules.sharded is not None
        why = refusals.two_dtypes(self.precision, self.autocast_dtype) if half else None
        return declared.forward(device.type, self.autocast_dtype, cache=not self._in_trainer, half_weights=why)

    @override
    def convert_input(self, data: object) -> object:
        """Cast floating-point tensors to the autocast dtype; a Trainer's batch stays without ``cast_inputs=True``."""
        if self._in_trainer and not self._casts_batch:
            return data
        self._known_device()
        return cast_floating(data, self.autocast_dtype)

    @override
    def convert_output(self, data: object) -> object:
        """Cast floating-point tensors to the default dtype (only Fabric calls this)."""
        return cast_floating(data, torch.get_default_dtype())

    # ---- a step: see `step.py`

    @override
    @shown_as(either.FabricPrecision.pre_backward)
    def pre_backward(self, tensor: Tensor, module: Module | None) -> Tensor:
        """Trainer: scale the loss, then run the Trainer's hooks."""
        if not self._in_trainer:
            return tensor
        scaled = tensor if self.scaler is None else self.scaler.scale_loss(tensor)
        return super().pre_backward(scaled, module)  # type: ignore[arg-type]

    @property
    def backward(self) -> Callable[..., None]:
        """``backward(tensor, module, *args, **kwargs)``; Fabric sees an override only if the override is needed."""
        if self.engine is not None:
            return self.engine.backward
        return self._backward_plain if self.scaler is None else self._backward_scaled

    @shown_as(either.FabricPrecision.backward)
    def _backward_plain(self, tensor: Tensor, model: Module | None, *args: object, **kwargs: object) -> None:
        if self.masters is not None and masters_step.waiting:
            masters_step.multiply_waiting()  # gradients that wait for a step, if another backward comes before the step
        parent: Any = either.TrainerPrecision if self._in_trainer else either.FabricPrecision
        parent.backward(self, tensor, model, *args, **kwargs)
        if self.modules.watched_backwards and self.backend:
            set_up.look_at_layers(self)

    def _backward_scaled(self, tensor: Tensor, model: Module | None, *args: object, **kwargs: object) -> None:
        assert self.scaler is not None
        tensor = tensor if self._in_trainer else self.scaler.scale_loss(tensor)
        self._backward_plain(tensor, model, *args, **kwargs)

    @override
    @shown_as(either.FabricPrecision.post_backward)
    def post_backward(self, tensor: Tensor, module: Module | None) -> Tensor:
        return super().post_backward(tensor, module) if self._in_trainer else tensor  # type: ignore[arg-type]

    @override
    def optimizer_step(
        self,
        optimizer: Any,
        model: either.LightningModule | None = None,
        closure: Callable[[], object] | None = None,
        **kwargs: object,
    ) -> Any:
        """Step. With loss scaling: run the closure, unscale, let the Trainer clip, step if all gradients are finite."""
        if self.engine is not None:
            return self.engine.optimizer_step(optimizer, model, closure, **kwargs)
        if self.modules.need_check:
            set_up.before_step_in_fabric(self, optimizer)
        if self.modules.groups_seen.get(optimizer) != len(optimizer.param_groups):
            set_up.see_groups(self, optimizer)
        if self.masters is not None:
            writes = self.modules.frozen_writes
            writes.steps += 1
            if writes.steps in set_up.LOOKS:
                writes.look(self)
        if self.scaler is not None:
            return step.scaled_step(self, self.scaler, optimizer, model, closure, kwargs)
        if model is not None and closure is not None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        return optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)

    @override
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale for ``fabric.clip_gradients``; gradients of a skipped step become zero, or Fabric would raise."""
        step.unscale_or_zero(self.scaler, optimizer)

    @override
    def main_params(self, optimizer: Optimizer) -> Iterator[Tensor]:  # type: ignore[override]  # masters are tensors
        """Return the tensors that the optimizer updates (float32 masters if they exist), for clipping and logging."""
        return main_params(optimizer)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: either.GradClipAlgorithmType = either.GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip unscaled gradients, also in manual optimization and with fused optimizers."""
        optimizer = optimizer.optimizer if isinstance(optimizer, either.both(either.LightningOptimizer)) else optimizer
        if self.engine is not None:  # clips in its step
            return
        if self.modules.groups_seen.get(optimizer) != len(optimizer.param_groups):
            set_up.see_groups(self, optimizer)
        if clip_val <= 0 or not step.clips(self.scaler, optimizer, clip_val, gradient_clip_algorithm):
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    # ---- state: see `loss_scale.py`

    @override
    def state_dict(self) -> dict[str, object]:
        """Return plain values: ``loss_scale`` if the loss is scaled, ``backend`` if layers are converted."""
        if self.scaler is None:
            return {}
        if self.scaler.scales_loss:
            return {loss_scale.SCALER_STATE: self.scaler.state_dict()}
        return {loss_scale.SKIPS_STATE: self.scaler.skipped_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Restore the loss scale if both runs scale the loss; else drop the stored scale and log a line."""
        loss_scale.load_loss_scale(self.scaler, state_dict, self.precision)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Trainer: load the states of other plugins, so that a checkpoint of any precision resumes under any other."""
        for foreign in loss_scale.foreign_states(checkpoint, type(self), LowPrecision):
            self.load_state_dict(foreign)

    def __str__(self) -> str:  # Lightning's errors show it
        return f"{type(self).__name__}({self.precision!r}, a plugin for lightning.pytorch and lightning.fabric)"


refuse_foreign(LowPrecision, NEMO)
