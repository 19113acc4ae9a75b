"""The options of plugins about half-precision weights, defined once for all plugins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypedDict

import torch

from lightning_lowprec.checks import Rule
from lightning_lowprec.conversion.options import Group, Names
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.gradient_dtypes import GradientDtypes
from lightning_lowprec.masters.weights import Float32Weights, HalfWeights

FloatingDtype = Annotated[torch.dtype, Rule("a floating-point torch.dtype", lambda dtype: dtype.is_floating_point)]
Float32OrNone = Annotated[
    torch.dtype | None, Rule("one of: None, torch.float32", lambda dtype: dtype in (None, torch.float32))
]
Weights = Literal["float32", "keep"]
MasterWeights = bool | Literal["remainder", "stochastic"] | MasterConfig


@dataclass(frozen=True, kw_only=True)
class MasterOptions(Group):
    """Half-precision weights, and what happens to their masters, buffers and gradients.

    Args:
        master_weights: False keeps float32 weights. Otherwise the weights are half precision and the optimizer updates
            float32 masters. ``True`` stores the masters (4 bytes per parameter). ``"remainder"`` stores the exact
            masters in 2 bytes (bf16 only). ``"stochastic"`` stores no masters and rounds the updated weights
            stochastically (bf16 only). A :class:`~lightning_lowprec.MasterConfig` can also ask for moments of 8
            bits, for updates during the backward pass, and set the seed.
        buffer_dtype: needs ``master_weights``. Floating-point buffers are cast to this dtype; None leaves them alone
            (rotary tables and running statistics need float32).
        grad_reduce_dtype: needs ``master_weights``. ``torch.float32`` averages gradients over the ranks of DDP in
            float32 and rounds the average once. None averages in the dtype of the weights.
        grad_accumulation_dtype: needs ``master_weights``. ``torch.float32`` accumulates the gradients of micro-batches
            in float32 (2 more bytes per parameter); under DDP it also averages them in float32. None accumulates in
            the dtype of the weights.
    """

    master_weights: MasterWeights = False
    buffer_dtype: FloatingDtype | None = None
    grad_reduce_dtype: Float32OrNone = None
    grad_accumulation_dtype: Float32OrNone = None

    def resolve(self, base: Literal["bf16", "fp16", "auto"]) -> HalfWeights | None:
        """Return what casts the weights and gives optimizers masters; None for float32 weights."""
        config = self._config(base)
        gradients = GradientDtypes(reduce=self.grad_reduce_dtype, accumulation=self.grad_accumulation_dtype)
        if config is not None:
            return HalfWeights(config, self.buffer_dtype, gradients)
        for field in ("buffer_dtype", "grad_reduce_dtype", "grad_accumulation_dtype"):
            value = getattr(self, field)
            if value is not None:
                raise ValueError(
                    f"`{field}={value}` goes with `master_weights`, got `master_weights=False`: float32 weights leave"
                    f" buffers alone and always accumulate and reduce gradients in float32. Leave `{field}` out, or set"
                    " `master_weights`."
                )
        return None

    def _config(self, base: Literal["bf16", "fp16", "auto"]) -> MasterConfig | None:
        choice = self.master_weights
        if choice is False:
            return None
        config = MasterConfig.of("fp32" if choice is True else choice)
        if base == "fp16" and config.form != "fp32":
            raise ValueError(
                f"`master_weights={choice!r}` is not valid with fp16, because it needs bf16 to be the upper half of"
                " float32; use `master_weights=True`, or bf16."
            )
        if config.update == "backward" and (base == "fp16" or self.grad_accumulation_dtype is not None):
            what = "fp16, because its step waits until the gradients of all weights are known to be finite"
            if base != "fp16":
                what = f"`grad_accumulation_dtype={self.grad_accumulation_dtype}`: no gradient is kept to be added to"
            raise ValueError(f"`MasterConfig(update='backward')` does not go with {what}. Use `update='step'`.")
        return config


@dataclass(frozen=True, kw_only=True)
class WeightOptions(Group):
    """Weights that are half precision when a model is set up, and the model after the Trainer is done.

    Args:
        weights: ``"float32"`` makes trainable half-precision weights float32 when the model is set up for training, in
            place, and logs a line; frozen weights and buffers stay. ``"keep"`` trains half-precision weights as they
            are, without masters. It does not go with ``master_weights``.
        keep_fp32: names of parameters, buffers or modules, parts of names, or patterns: these tensors stay float32
            where others become half precision, beside those that the model declares float32. Under FSDP2 they are
            gathered as float32 too. Products with them run under autocast, as others do.
        plain_after_fit: hand the model back without a trace of this precision when the Trainer's ``fit``, ``test`` or
            any other run ends: torch's own layers, and float32 weights with the values of the masters. A model that
            FSDP2 or ZeRO has sharded stays as it is, and a log line says so.
    """

    weights: Weights = "float32"
    keep_fp32: Names = ()
    plain_after_fit: bool = True

    def keeping(self, names: Sequence[str]) -> WeightOptions:
        """Return these options, with more names of tensors that stay float32."""
        return replace(self, keep_fp32=(*self.keep_fp32, *names))

    def resolve(self, masters: HalfWeights | None) -> Float32Weights | None:
        """Return what makes weights float32; None: half-precision weights stay."""
        if self.weights == "keep" and masters is not None:
            raise ValueError(
                "`weights='keep'` is not valid with `master_weights`, which takes half-precision weights as they are."
                " Leave one of the two out."
            )
        if masters is not None:
            masters.keep_fp32 = self.keep_fp32
        return Float32Weights() if self.weights == "float32" else None


class WeightChoices(TypedDict, total=False):
    """The fields of :class:`WeightOptions`, for type checkers."""

    weights: Weights
    keep_fp32: Sequence[str]
    plain_after_fit: bool


class MasterChoices(TypedDict, total=False):
    """The fields of :class:`MasterOptions`, for type checkers: ``**options: Unpack[MasterChoices]``."""

    master_weights: MasterWeights
    buffer_dtype: torch.dtype | None
    grad_reduce_dtype: torch.dtype | None
    grad_accumulation_dtype: torch.dtype | None
