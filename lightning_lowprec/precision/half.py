"""fp16 and bf16 by autocast: in training, with float32 or half-precision weights, or in evaluation alone."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Literal, final

import torch
from torch.nn import Module
from typing_extensions import override

from lightning_lowprec.conversion.name_formats import of_options
from lightning_lowprec.conversion.options import shows, takes
from lightning_lowprec.hardware import bf16_refusal, default_device, refusal_and_remedy
from lightning_lowprec.messages import dtype_name, info
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.loss_scale import LossScaler
from lightning_lowprec.precision.options import BASE_DTYPES, Base, MasterOptions, TrainingOptions
from lightning_lowprec.runs_where import RecipeKey

HalfName = Literal["bf16", "fp16", "auto"]
_WITHOUT_MASTERS: Final = {"auto": "half-auto", "bf16": "bf16-mixed", "fp16": "16-mixed"}


@dataclass(frozen=True, kw_only=True)
class HalfOptions(TrainingOptions, MasterOptions):
    """The arguments of :class:`HalfMixed`."""

    dtype: HalfName = field(default="auto", kw_only=False)


@final
@shows()
class HalfMixed(LowPrecision):
    """Half precision by ``torch.autocast``, with float32 weights or with half-precision weights and float32 masters.

    Args:
        dtype: ``"bf16"``, ``"fp16"`` (with loss scaling), or ``"auto"``: bf16 where the device has it, else fp16.

    Raises:
        ValueError: the dtype is unknown; bf16 gets a loss scale, although it has the range of float32; fp16 gets no
            loss scale; or an option needs ``master_weights`` and there are none.
    """

    @takes(HalfOptions)
    def __init__(self, options: HalfOptions) -> None:
        dtype = options.dtype
        self._dtype: torch.dtype | None = BASE_DTYPES.get(dtype)
        if dtype == "auto":  # the options are checked as fp16's are; the device decides later whether they are used
            self._fp16_scaler = options.scaler("fp16")
            scaler = LossScaler(None) if options.skip_nonfinite else None
        else:
            self.base, scaler = dtype, options.scaler(dtype)
        masters = options.resolve(dtype)
        super().__init__(scaler, masters, options)
        if masters is None:
            self.precision = _WITHOUT_MASTERS[dtype]
        elif dtype == "auto":
            self.precision = "half-auto-master"
        else:
            self.precision = dtype + of_options("bf16", masters.config.kept)

    @functools.cached_property
    def base(self) -> Base:  # type: ignore[override]  # of "auto", until the device is known
        """The word of the dtype."""
        return "bf16" if bf16_refusal(self.modules.device or default_device()) is None else "fp16"

    @property
    @override
    def hardware_recipe(self) -> RecipeKey:
        if self._dtype is None:
            return "half-auto"
        return "bf16" if self._dtype is torch.bfloat16 else "fp16"

    @override
    def refusal(self, device: torch.device) -> str | None:
        return refusal_and_remedy(self.hardware_recipe, device)

    @override
    def emulates(self, device: torch.device) -> bool:
        """A GPU without bf16 tensor cores emulates bf16."""
        return self._dtype is torch.bfloat16 and bf16_refusal(device) is not None

    @override
    def how(self, device: torch.device) -> str:
        if self._dtype is not None:
            emulated = f", emulated, since {bf16_refusal(device)}" if self.emulates(device) else ""
            return f"{dtype_name(self._dtype)} autocast{emulated}"
        refusal = bf16_refusal(device)
        if refusal is None:
            return f"bf16 autocast, since {device.type} has bf16"
        return f"fp16 autocast with loss scaling, since {refusal}"

    @override
    def _prepare(self, module: Module, device: torch.device) -> None:
        self.decide(device)
        if self.masters is not None:
            info(f"{self.precision}: weights in {self.base}, {self.masters.config.words}.")

    def decide(self, device: torch.device) -> None:
        """Choose the dtype of ``"auto"`` for a device, and say which; with fp16 the loss is scaled."""
        if self._dtype is not None:
            return
        info(f"{self.precision}: {self.how(device)}.")
        self.base = "bf16" if bf16_refusal(device) is None else "fp16"
        self._dtype = self.autocast_dtype
        if self._dtype is torch.float16:
            if self.masters is not None and self.masters.config.form != "fp32":
                raise RuntimeError(
                    f"`master_weights={self.masters.config.kept!r}` needs bf16, but {bf16_refusal(device)}; use"
                    " `master_weights=True`."
                )
            assert self._fp16_scaler is not None
            self.scaler = self._fp16_scaler
            for optimizer in self.optimizers:
                self.scaler.watch(optimizer)


@final
@shows()
class HalfEval(LowPrecision):
    """Validation, test and prediction under autocast in half precision; training in float32, as with ``32-true``.

    The weights stay float32, so evaluation saves time and activations, and not the bytes of the weights. In Fabric a
    model trains while it is in train mode.

    Args:
        dtype: ``"bf16"`` or ``"fp16"``.

    Raises:
        ValueError: the dtype is unknown, or the model is sharded by FSDP2, which gathers weights in one dtype.
    """

    def __init__(self, dtype: Literal["bf16", "fp16"] = "bf16") -> None:
        super().__init__(None)
        self.base = dtype
        self.precision = f"{dtype}-eval"

    @property
    @override
    def peak_rate_dtype(self) -> torch.dtype:
        return torch.float32

    @override
    def how(self, device: torch.device) -> str:
        return f"float32 in training, {dtype_name(self.autocast_dtype)} autocast in evaluation"

    @override
    def bind_shards(self, reshard: Callable[[Module], None]) -> None:
        raise ValueError(
            f"`HalfEval` (precision={self.precision!r}) does not run under FSDP2, which gathers weights in one dtype."
            " Use '32-true' or 'bf16-mixed' there."
        )

    def _trains(self) -> bool:
        self._known_device()
        return any(module.training for module in self.modules.prepared)

    @override
    def forward_context(self) -> AbstractContextManager[object]:
        return nullcontext() if self._trains() else super().forward_context()

    @override
    def convert_input(self, data: object) -> object:
        return data if self._trains() else super().convert_input(data)
