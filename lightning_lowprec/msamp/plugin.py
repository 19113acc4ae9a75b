"""MS-AMP's levels: Linear weights, their gradients and their optimizer state in 8 and 16 bits, with scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.conversion.backends import unconvert
from lightning_lowprec.conversion.converted import check_converted
from lightning_lowprec.conversion.invariants import unchanged
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.hardware import default_device, describe, fp8_refusal
from lightning_lowprec.msamp.converted_optimizers import convert_optimizer_
from lightning_lowprec.msamp.ddp import DDPModels
from lightning_lowprec.msamp.linear import ScaledLinear, scale_linears, scaled_linears
from lightning_lowprec.msamp.weight import LEVELS, Level, msamp_state_of
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.half import DTYPES
from lightning_lowprec.precision.host import alive, trainer_of
from lightning_lowprec.precision.loss_scale_choice import LossScaleChoice, resolve_loss_scale
from lightning_lowprec.precision.plans import plan_or_raise
from lightning_lowprec.precision.refusals import refuse_averaging

Base = Literal["bf16", "fp16"]


class MSAMP(LowPrecision):
    """Linear layers with weights of 8 or 16 bits, FP8 GEMMs and FP8 gradients; the rest under autocast, in float32.

    AdamW and SGD are made to step such weights in place. Bytes per weight, with gradient, master and AdamW's moments:
    O1 11, O2 6, O3 7 (in float32: 16).

    Args:
        level: ``"O1"`` keeps fp16 weights with a scale, ``"O2"`` also e4m3 and fp16 moments, ``"O3"`` e4m3 weights
            beside fp16 masters.
        keep: Linears that stay as they are beside output heads, routers and LoRA adapters: fqns, parts of fqns,
            patterns.
        only: if given, just these convert, and none of the built-in rules applies.
        first_last_layers_bf16: keep the first ``num_layers_at_start_in_bf16`` and the last
            ``num_layers_at_end_in_bf16`` blocks.
        frozen: ``"keep"`` leaves Linears that do not train as they are.
        min_gain: as in :class:`FP8TorchAO`.
        tokens: as in :class:`FP8TorchAO`.
        base: dtype of everything else: ``"bf16"``, or ``"fp16"`` with loss scaling.
        stochastic_rounding: of the fp16 weights (O3: masters), so that updates below half a step move them on average.
        seed: of the stochastic rounding; the same on every rank.
        emulate: multiply dequantised codes in float32 instead of FP8 kernels. None: on CPU yes, on a GPU no, and a GPU
            without FP8 raises.
        fp8_eval: whether validation, test and prediction multiply in FP8 too, or with the weights as they are stored.
        grad_accumulation_dtype: ``torch.float32`` adds the gradients of micro-batches up in float32 (3 more bytes per
            weight); None adds them in e4m3.
        loss_scale: as in :class:`HalfMixed`; only for ``base="fp16"``.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        TypeError: an optimizer that cannot step such weights.
        RuntimeError: the device has no FP8 and ``emulate`` is not set.
    """

    keeps_codes = True

    def __init__(
        self,
        level: Level = "O2",
        *,
        keep: Sequence[str] = (),
        only: Sequence[str] | None = None,
        first_last_layers_bf16: bool = False,
        num_layers_at_start_in_bf16: int = 1,
        num_layers_at_end_in_bf16: int = 1,
        frozen: Literal["convert", "keep"] = "convert",
        min_gain: float | Literal["auto"] | None = None,
        tokens: int | None = None,
        base: Base = "bf16",
        stochastic_rounding: bool = False,
        seed: int = 0,
        emulate: bool | None = None,
        fp8_eval: bool = True,
        grad_accumulation_dtype: torch.dtype | None = None,
        loss_scale: LossScaleChoice = "auto",
    ) -> None:
        for field, value, allowed in (("level", level, LEVELS), ("base", base, get_args(Base))):
            if value not in allowed:
                raise ValueError(f"`{field}={value!r}` is not valid; expected one of: {', '.join(allowed)}.")
        if grad_accumulation_dtype not in (None, torch.float32):
            raise ValueError(
                f"`grad_accumulation_dtype={grad_accumulation_dtype!r}` is not valid; expected one of: None (e4m3 with"
                " a scale), torch.float32."
            )
        super().__init__(resolve_loss_scale(base, loss_scale))
        self.level: Level = level
        self.shards_codes = level == "O3"
        self.layers = LayerOptions(
            keep=keep,
            only=only,
            first_last_layers_bf16=first_last_layers_bf16,
            num_layers_at_start_in_bf16=num_layers_at_start_in_bf16,
            num_layers_at_end_in_bf16=num_layers_at_end_in_bf16,
            frozen=frozen,
            min_gain=min_gain,
            tokens=tokens,
        )
        self.base: Base = base
        self.stochastic_rounding, self.seed = stochastic_rounding, seed
        self.emulate = emulate
        self.fp8_eval = fp8_eval
        self.grad_accumulation_dtype = grad_accumulation_dtype
        self.plan: Plan | None = None
        """What was converted and what was kept, of the module that was set up last."""
        self.precision = f"msamp-{level.lower()}" + ("-fp16" if base == "fp16" else "")
        self._replicas = DDPModels(self.precision)

    # ---- device

    @property
    @override
    def autocast_dtype(self) -> torch.dtype:
        """``torch.bfloat16`` or ``torch.float16``: of everything that is no FP8 GEMM."""
        return DTYPES[self.base]

    @property
    @override
    def compute_dtype(self) -> torch.dtype:
        """``torch.int8`` where FP8 kernels run (Lightning's tables list FP8 peaks there), else the base dtype."""
        return self.autocast_dtype if self.emulates(self._device or default_device()) else torch.int8

    @override
    def emulates(self, device: torch.device) -> bool:
        """On CPU unless told otherwise; on a GPU only if told so."""
        return device.type == "cpu" if self.emulate is None else self.emulate

    @override
    def refusal(self, device: torch.device) -> str | None:
        """A GPU without FP8 that is not told to emulate it."""
        reason = fp8_refusal(device)
        if reason is None or device.type == "cpu" or self.emulates(device):
            return None
        return (
            f"{reason}. Use a GPU with FP8 (compute capability 8.9 or above), 'bf16-mixed', or"
            f" `plugins=MSAMP({self.level!r}, emulate=True)` to emulate FP8, slowly"
        )

    @override
    def how(self, device: torch.device) -> str:
        """FP8 kernels, or emulated."""
        if not self.emulates(device):
            return f"FP8 kernels of {describe(device)}"
        return (
            f"FP8 is emulated on {describe(device)}: codes and scales as on a GPU, products in float32; slow, for"
            " tests and for looking at the numerics"
        )

    # ---- conversion

    @override
    def bind_shards(self) -> None:
        """Our FSDP2 strategy runs this: it shards O3's weights and masters.

        Raises:
            ValueError: another level.
        """
        if not self.shards_codes:
            raise ValueError(
                f"`precision={self.precision!r}` does not run sharded. It runs on one device and under 'ddp';"
                " 'msamp-o3' runs under 'fsdp2', and so does 'fp8-hybrid'."
            )
        super().bind_shards()

    @override
    def _settle(self, module: Module, device: torch.device) -> None:
        refusal = self.refusal(device)
        if refusal is not None:
            raise RuntimeError(f"`precision={self.precision!r}` cannot run: {refusal}.")
        unconvert(module)
        plan = plan_or_raise(module, self.layers, precision=self.precision, base=self.base, converted=ScaledLinear)
        held = scaled_linears(module)
        if held:
            self._check_held(module, held, plan)
        else:
            with unchanged(module, but="the dtype"):
                scale_linears(module, plan.converted, self.level)
        for linear in scaled_linears(module).values():
            linear.emulate, linear.fp8_eval = self.emulates(device), self.fp8_eval
            linear.float32_gradients = self.grad_accumulation_dtype is torch.float32
        if self._sharded is None:
            self._replicas.exclude_codes(module, will_train=self._will_train)
        for optimizer in alive(self._optimizers):
            self._adopt(optimizer)
        if plan != self.plan:
            rank_zero_info(f"{self.precision}: {plan.summary()}.")
            if self.emulates(device):
                rank_zero_info(f"{self.precision}: {self.how(device)}.")
        self.plan = plan

    def _check_held(self, module: Module, held: dict[str, ScaledLinear], plan: Plan) -> None:
        """Raise if an earlier conversion was another one: weights that became codes do not become others."""
        with_master = {fqn for fqn, linear in held.items() if _has_master(linear)}
        if set(plan.converted) != held.keys() or with_master != (held.keys() if self.level == "O3" else set()):
            raise ValueError(
                f"`precision={self.precision!r}`: {type(module).__name__} was converted before, with another level or"
                f" other layers ({len(held)} hold codes, this precision would convert {len(plan.converted)}). Load its"
                " state dict, which is plain, into a fresh model."
            )

    # ---- optimizers and replicas

    def _adopt(self, optimizer: Any) -> None:
        raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        convert_optimizer_(raw, self.level, stochastic_rounding=self.stochastic_rounding, seed=self.seed)

    @override
    def see_optimizer(self, optimizer: Optimizer) -> None:
        """Fabric, by the names in ``precision=``: an optimizer is set up, before its first step."""
        super().see_optimizer(optimizer)
        self._adopt(optimizer)

    @override
    def see_module(self, module: Module) -> None:
        """A module as the strategy wrapped it: all ranks get the codes of rank 0."""
        super().see_module(module)
        self._replicas.synchronize(module, always=False)

    @override
    def connect(self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Trainer: see the wrapped model, and make its optimizers step codes."""
        trainer = trainer_of(model.module if isinstance(model, DistributedDataParallel) else model)
        refuse_averaging(
            getattr(trainer, "callbacks", ()),
            f"averages parameters, which hold codes under `precision={self.precision!r}`: their scales differ. Average"
            " the state dicts of checkpoints, which are plain.",
        )
        if not isinstance(model, DistributedDataParallel) and self._sharded is None:
            self._replicas.synchronize(model, always=True)
        for optimizer in optimizers:
            self._adopt(optimizer)
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def _before_first_step(self, optimizer: Optimizer) -> None:
        super()._before_first_step(optimizer)
        if self._sharded is None:
            self._replicas.check_registered(optimizer)

    @override
    def _check_optimizers(self, optimizers: list[Optimizer]) -> None:
        modules, sharded = alive(self._modules), self._sharded is not None
        check_converted(modules, alive(self._unchecked), optimizers, ScaledLinear, sharded=sharded)

    # ---- step

    @override
    def optimizer_step(
        self,
        optimizer: Any,
        model: LightningModule | None = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in every precision, with the FP8 gradients averaged over the ranks before anybody looks at them."""
        self._adopt(optimizer)  # a second one in Fabric without the names, or with a weight that was unfrozen

        def averaged() -> Any:
            result = None if closure is None else closure()
            self._replicas.average_gradients(optimizer)
            return result

        with self._replicas.averaging_once():
            if closure is None:
                averaged()
            own = None if closure is None else averaged
            return super().optimizer_step(optimizer, model=model, closure=own, **kwargs)

    @override
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Called by ``fabric.clip_gradients``: average, then unscale."""
        self._replicas.average_gradients(optimizer)
        super().unscale_gradients(optimizer)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip averaged, unscaled gradients; FP8 ones are rounded again where they are clipped by value."""
        if clip_val > 0:
            self._replicas.average_gradients(optimizer)
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)


def _has_master(linear: ScaledLinear) -> bool:
    scaled = msamp_state_of(linear.weight)
    return scaled is not None and scaled.master is not None
