"""Options that precision plugins share; :mod:`lightning_lowprec.conversion.options` makes parameters of them."""

import os
from dataclasses import dataclass
from typing import Annotated, Final, Literal, cast

import torch

from lightning_lowprec.checks import Rule, check_choice
from lightning_lowprec.conversion.head import HeadKind
from lightning_lowprec.conversion.options import Group, Names
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.weights import Float32Weights, HalfWeights
from lightning_lowprec.numerics.tensor_cores import UNITS, Emulation
from lightning_lowprec.precision.loss_scale import LossScale, LossScaler, StaticScale

Base = Literal["bf16", "fp16"]
Weights = Literal["float32", "keep"]
BASE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LossScaleChoice = Literal["auto", "dynamic"] | StaticScale | LossScale | None
FloatingDtype = Annotated[torch.dtype, Rule("a floating-point torch.dtype", lambda dtype: dtype.is_floating_point)]
Float32OrNone = Annotated[
    torch.dtype | None, Rule("one of: None, torch.float32", lambda dtype: dtype in (None, torch.float32))
]
EMULATE: Final = "LOWPREC_EMULATE"
"""The environment variable that names a GPU in place of the option ``emulate``."""
MasterWeights = bool | Literal["remainder", "8bit", "stochastic"] | MasterConfig


@dataclass(frozen=True, kw_only=True)
class RunOptions(Group):
    """Options of every plugin: the loss and its scale, half-precision weights, and the model after a run.

    Args:
        loss_scale: ``"auto"`` scales dynamically with fp16 and not at all with bf16. ``"dynamic"``, a number (a static
            scale) and a :class:`~lightning_lowprec.LossScale` are for fp16 only.
        skip_nonfinite: skip an optimizer step, on all ranks, if a gradient is NaN or inf: weights, optimizer state and
            scales stay those before the step. fp16 always does so. False lets bf16 step as ``bf16-mixed`` does. 50
            skipped steps in a row raise. Buffers that the forward has changed (BatchNorm's) are not restored.
        weights: ``"float32"`` makes trainable half-precision weights float32 when the model is set up for training, in
            place, and logs a line; frozen weights and buffers stay. ``"keep"`` trains half-precision weights as they
            are, without masters. It does not go with ``master_weights``.
        plain_after_fit: hand the model back without a trace of this precision when the Trainer's ``fit``, ``test`` or
            any other run ends: torch's own layers, and float32 weights with the values of the masters. A model that
            FSDP2 or ZeRO has sharded stays as it is, and a log line says so.
        head: ``"bf16"`` leaves the head and the loss of the model alone; they run under autocast. ``"chunked"``
            computes the loss from hidden states in training, some tokens at a time, and never all logits at once; the
            logits of the model's output are computed if they are read. ``"fp8"`` does so with matrix products in FP8,
            ``"fp32"`` in float32, with float32 logits in evaluation too; ``keep_fp32=["lm_head"]`` keeps the weight in
            float32 as well. All three are for causal models of ``transformers`` that are recognised exactly, and raise
            for others. For them there is ``lightning_lowprec.losses.linear_cross_entropy``.
    """

    loss_scale: LossScaleChoice = "auto"
    skip_nonfinite: bool = False
    weights: Weights = "float32"
    plain_after_fit: bool = True
    head: HeadKind = "bf16"

    def scaler(self, base: Base) -> LossScaler | None:
        """Return what scales the loss and skips steps for a base dtype; None: every step is made, unscaled."""
        choice = self.loss_scale
        if base == "bf16":
            if choice not in ("auto", None):
                raise ValueError(
                    f"`loss_scale={choice!r}` is not valid with bf16, which has the range of float32; expected 'auto'"
                    " or None, or use fp16."
                )
            return LossScaler(None) if self.skip_nonfinite else None
        if choice is None:
            raise ValueError(
                "`loss_scale=None` is not valid with fp16, whose gradients underflow below 6e-8; expected 'auto',"
                " 'dynamic', a number or a LossScale, or use bf16."
            )
        return LossScaler(LossScale.of("dynamic" if choice == "auto" else choice))

    def float32_weights(self, masters: HalfWeights | None) -> Float32Weights | None:
        """Return what makes weights float32; None: half-precision weights stay."""
        if self.weights == "keep" and masters is not None:
            raise ValueError(
                "`weights='keep'` is not valid with `master_weights`, which takes half-precision weights as they are."
                " Leave one of the two out."
            )
        return Float32Weights() if self.weights == "float32" else None


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(RunOptions):
    """Options of every plugin that casts no weight by itself.

    Args:
        keep_fp32: names of parameters, buffers or modules, parts of names, or patterns: these tensors stay float32
            where others become half precision, beside those that the model declares float32. Under FSDP2 they are
            gathered as float32 too. Products with them run under autocast, as others do.
    """

    keep_fp32: Names = ()


@dataclass(frozen=True, kw_only=True)
class MasterOptions(Group):
    """Half-precision weights, and what happens to their masters, buffers and gradients.

    Args:
        master_weights: False keeps float32 weights. Otherwise the weights are half precision and the optimizer updates
            float32 masters. ``True`` stores the masters (4 bytes per parameter). ``"remainder"`` stores the exact
            masters in 2 bytes (bf16 only). ``"8bit"`` does the same, and stores the optimizer's moments in 8 bits.
            ``"stochastic"`` stores no masters and rounds the updated weights stochastically (bf16 only). A
            :class:`~lightning_lowprec.MasterConfig` combines form and moments, and sets the seed.
        buffer_dtype: needs ``master_weights``. Floating-point buffers are cast to this dtype; None leaves them alone
            (rotary tables and running statistics need float32).
        grad_accumulation_dtype: needs ``master_weights``. ``torch.float32`` accumulates the gradients of micro-batches
            in float32 (2 more bytes per parameter); not under DDP. None accumulates in the dtype of the weights.
        cast_inputs: needs ``master_weights``. Cast floating-point tensors of the Trainer's batch to the dtype of the
            weights, targets too, for models that write half-precision weights into what they are given
            (``index_put``, ``lerp``, ``scatter_add``). False: the batch arrives as the loader made it. Fabric casts
            the arguments of ``forward`` always, as it does for ``bf16-mixed``.
    """

    master_weights: MasterWeights = False
    buffer_dtype: FloatingDtype | None = None
    grad_accumulation_dtype: Float32OrNone = None
    cast_inputs: bool = False

    def resolve(self, base: Literal["bf16", "fp16", "auto"]) -> HalfWeights | None:
        """Return what casts the weights and gives optimizers masters; None for float32 weights."""
        choice = self.master_weights
        for field in ("buffer_dtype", "grad_accumulation_dtype", "cast_inputs") if choice is False else ():
            if value := getattr(self, field):
                raise ValueError(
                    f"`{field}={value}` goes with `master_weights`, got `master_weights=False`: float32 weights leave"
                    f" buffers alone and always accumulate and reduce gradients in float32. Leave `{field}` out, or set"
                    " `master_weights`."
                )
        if choice is False:
            return None
        config = MasterConfig.of("fp32" if choice is True else choice)
        if base == "fp16" and config.form != "fp32":
            raise ValueError(
                f"`master_weights={choice!r}` is not valid with fp16, because it needs bf16 to be the upper half of"
                " float32; use `master_weights=True`, or bf16."
            )
        return HalfWeights(config, self.buffer_dtype, self.grad_accumulation_dtype, cast_inputs=self.cast_inputs)


@dataclass(frozen=True, kw_only=True)
class FP8Options(Group):
    """Options of layers in FP8 or int8: the dtype outside of their GEMMs, and evaluation.

    Args:
        base: dtype of every operation outside of these GEMMs: ``"bf16"``, or ``"fp16"`` with loss scaling.
        fp8_eval: whether validation, test and prediction run these GEMMs too, and not plain Linears.
    """

    base: Base = "bf16"
    fp8_eval: bool = True


@dataclass(frozen=True, kw_only=True)
class EmulationOptions(Group):
    """The option of layers in FP8 that can be emulated.

    Args:
        emulate: multiply dequantised codes in float32 instead of calling FP8 kernels. ``"hopper"``, ``"ada"``
            and ``"blackwell"`` add up as the tensor cores of this GPU do, bit for bit. None: what the environment
            variable ``LOWPREC_EMULATE`` names; else True on CPU, False on a GPU; a GPU without FP8 then raises.
    """

    emulate: Emulation | None = None

    @property
    def emulation(self) -> Emulation | None:
        """``emulate``, or the GPU that the environment names in its place."""
        name = os.environ.get(EMULATE)
        if self.emulate is not None or not name:
            return self.emulate
        check_choice(EMULATE, name, UNITS)
        return cast(Emulation, name)
