"""FP8 training through torchao: scales computed from each tensor, no state, one device or DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.conversion.backends import unconvert
from lightning_lowprec.conversion.converted import check_converted
from lightning_lowprec.conversion.gains import DEFAULT_TOKENS, SOURCE
from lightning_lowprec.conversion.invariants import unchanged
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.extras import import_refusal, require
from lightning_lowprec.hardware import default_device, describe, fp8_refusal
from lightning_lowprec.masters.options import MasterWeights, resolve_masters
from lightning_lowprec.precision.backend_choice import check_ranks_agree, check_resumes
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.half import DTYPES
from lightning_lowprec.precision.loss_scale_choice import LossScaleChoice, resolve_loss_scale
from lightning_lowprec.precision.plans import plan_or_raise
from lightning_lowprec.references import alive

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
Base = Literal["bf16", "fp16"]
FP8Format = Literal["hybrid", "e4m3"]
BACKEND: Final = "torchao"
CPU_SCALES_TENSORWISE = torch.__version__ < "2.13"
"""Whether ``torch._scaled_mm`` on CPU takes one scale per tensor only; given more, it fails an internal assert."""

_NAMES = {
    ("tensorwise", "hybrid"): "fp8-tensorwise",
    ("tensorwise", "e4m3"): "fp8-e4m3-torchao",
    ("rowwise", "e4m3"): "fp8-rowwise",
    ("rowwise_with_gw_hp", "e4m3"): "fp8-rowwise-gw-hp",
}


class FP8TorchAO(LowPrecision):
    """The GEMMs of the Linear layers in FP8, everything else under autocast; float32 weights unless told otherwise.

    Args:
        recipe: ``"tensorwise"`` (one scale per tensor, the fastest), ``"rowwise"`` (one per row, e4m3 everywhere), or
            ``"rowwise_with_gw_hp"`` (rowwise, with the weight gradient in high precision: the most accurate).
        keep: Linears that stay in high precision beside output heads, routers and LoRA adapters: fqns, parts of fqns,
            patterns.
        only: if given, just these convert, and none of the built-in rules applies.
        first_last_layers_bf16: keep the first ``num_layers_at_start_in_bf16`` and the last
            ``num_layers_at_end_in_bf16`` blocks.
        frozen: ``"keep"`` leaves Linears that do not train in high precision.
        min_gain: keep layers that are expected to gain less than this over bf16; ``"auto"``: those below break-even.
        tokens: tokens per step and device that ``min_gain`` assumes.
        base: dtype of everything else: ``"bf16"``, or ``"fp16"`` with loss scaling (tensorwise only).
        fp8_format: gradients in e5m2 (``"hybrid"``) or e4m3; None is the recipe's own (hybrid for tensorwise).
        emulate: multiply dequantised codes in float32 instead of FP8 kernels. None: on CPU yes, on a GPU no, and a
            GPU without FP8 raises.
        compile: ``"auto"`` compiles repeated blocks in place on CUDA unless some are compiled already; True does
            on any device, False never; a mapping gives ``torch.compile`` options.
        fp8_eval: whether validation, test and prediction run in FP8 too.
        round_scales_to_power_of_2: None is the recipe's own choice (True for rowwise).
        loss_scale: as in :class:`HalfMixed`; only for ``base="fp16"``.
        master_weights: as in :class:`HalfMixed`: weights in ``base`` with float32 masters.
        buffer_dtype: as in :class:`HalfMixed`.
        grad_reduce_dtype: as in :class:`HalfMixed`.
        grad_accumulation_dtype: as in :class:`HalfMixed`.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        ImportError: torchao is not installed (ModuleNotFoundError) or does not import.
        RuntimeError: the device has no FP8 and ``emulate`` is not set.
    """

    def __init__(
        self,
        recipe: Recipe = "tensorwise",
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
        fp8_format: FP8Format | None = None,
        emulate: bool | None = None,
        compile: Literal["auto"] | bool | Mapping[str, Any] = "auto",
        fp8_eval: bool = True,
        round_scales_to_power_of_2: bool | None = None,
        loss_scale: LossScaleChoice = "auto",
        master_weights: MasterWeights = False,
        buffer_dtype: torch.dtype | None = None,
        grad_reduce_dtype: torch.dtype | None = None,
        grad_accumulation_dtype: torch.dtype | None = None,
    ) -> None:
        _check(recipe, base, fp8_format, compile)
        masters = resolve_masters(
            base,
            master_weights,
            buffer_dtype=buffer_dtype,
            grad_reduce_dtype=grad_reduce_dtype,
            grad_accumulation_dtype=grad_accumulation_dtype,
        )
        super().__init__(resolve_loss_scale(base, loss_scale), masters)
        require("torchao", f"FP8TorchAO(recipe={recipe!r})")
        self.recipe: Recipe = recipe
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
        self.fp8_format: FP8Format = fp8_format or ("hybrid" if recipe == "tensorwise" else "e4m3")
        self.emulate = emulate
        self.compile = compile
        self.fp8_eval = fp8_eval
        self.round_scales_to_power_of_2 = round_scales_to_power_of_2
        self.backend_is_chosen = False
        """Whether the name in ``precision=`` left the backend to us."""
        self.plan: Plan | None = None
        """What was converted and what was kept, of the module that was set up last."""
        self.precision = _NAMES[self.recipe, self.fp8_format] + ("-fp16" if base == "fp16" else "")

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
        """No torchao, or a GPU without FP8 that is not told to emulate it."""
        reason = fp8_refusal(device)
        if device.type == "cpu" and not self.emulates(device) and self.recipe != "tensorwise" and CPU_SCALES_TENSORWISE:
            return f"torch {torch.__version__} has no rowwise FP8 kernel for CPU (2.13 has). Leave `emulate` alone"
        if reason is None or device.type == "cpu" or self.emulates(device):
            return import_refusal("torchao.float8", f"`precision={self.precision!r}`")
        return (
            f"{reason}. Use a GPU with FP8 (compute capability 8.9 or above), 'bf16-mixed', or"
            " `plugins=FP8TorchAO(..., emulate=True)` to emulate FP8, slowly"
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

    @override
    def _settle(self, module: Module, device: torch.device) -> None:
        refusal = self.refusal(device)
        if refusal is not None:
            raise RuntimeError(f"`precision={self.precision!r}` cannot run: {refusal}.")
        if self.backend_is_chosen:
            check_ranks_agree(self.precision, BACKEND)
        from lightning_lowprec.torchao import linear as torchao

        unconvert(module, but=BACKEND)
        torchao.revert(module)  # fit, then test: the same plan again
        plan = plan_or_raise(module, self.layers, precision=self.precision, base=self.base, recipe=self.recipe)
        config = torchao.linear_config(
            self.recipe,
            fp8_format=self.fp8_format,
            emulate=self.emulates(device),
            round_scales_to_power_of_2=self.round_scales_to_power_of_2,
        )
        with unchanged(module):
            torchao.convert(module, plan.converted, config, fp8_eval=self.fp8_eval)
        if plan.converted:
            self._compile(module, device)
        if plan != self.plan:
            self._say(plan, device)
        self.plan = plan

    def _say(self, plan: Plan, device: torch.device) -> None:
        rank_zero_info(f"{self.precision}: {plan.summary()}.")
        if self.layers.min_gain is not None:
            tokens = self.layers.tokens or DEFAULT_TOKENS
            rank_zero_info(f"{self.precision}: min_gain assumes {tokens} tokens per step and device ({SOURCE}).")
        slow = plan.below_break_even()
        if self.emulates(device):
            rank_zero_info(f"{self.precision}: {self.how(device)}.")
        elif slow and device.type == "cuda":  # the published figures are those of a GPU
            names = ", ".join(f"{row.fqn} ({row.in_features} -> {row.out_features})" for row in slow[:3])
            rank_zero_warn(
                f"`precision={self.precision!r}`: {len(slow)} of {len(plan.converted)} converted layers are expected to"
                f" be slower in FP8 than in bf16 ({SOURCE}): {names}{', ...' if len(slow) > 3 else ''}."
                " `plugins=FP8TorchAO(min_gain='auto')` keeps them in bf16."
            )

    @override
    def _check_optimizers(self, optimizers: list[Optimizer]) -> None:
        from lightning_lowprec.torchao.linear import FP8Linear

        modules, sharded = alive(self._modules), self._sharded is not None
        check_converted(modules, alive(self._unchecked), optimizers, FP8Linear, sharded=sharded)

    def _compile(self, module: Module, device: torch.device) -> None:
        from lightning_lowprec.torchao.compile import compile_blocks, is_compiled

        if self.compile is False or (self.compile == "auto" and (device.type != "cuda" or is_compiled(module))):
            return
        options = self.compile if isinstance(self.compile, Mapping) else {}
        count = compile_blocks(module, options)
        if count:
            rank_zero_info(f"{self.precision}: compiling {count} repeated blocks; the first steps are slow.")
        elif self.compile == "auto":
            rank_zero_info(
                f"{self.precision}: found no repeated blocks to compile. FP8 is slow without `torch.compile`: compile"
                " the model yourself."
            )
        else:
            raise ValueError(
                f"`compile={self.compile!r}` found no repeated blocks (children of one class in an nn.ModuleList that"
                " hold FP8 layers); compile the model yourself with `torch.compile` and pass `compile=False`."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        """The loss scale if there is one, and which backend computed the FP8 GEMMs."""
        return {**super().state_dict(), "backend": BACKEND}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loss scale; raise if the name left the backend to us and the checkpoint has the other one."""
        if self.backend_is_chosen:
            check_resumes(self.precision, BACKEND, state_dict)
        super().load_state_dict(state_dict)


def _check(recipe: str, base: str, fp8_format: str | None, compile: object) -> None:
    _check_choice("recipe", recipe, get_args(Recipe))
    _check_choice("base", base, get_args(Base))
    _check_choice("fp8_format", fp8_format, (None, *get_args(FP8Format)))
    _check_compile(compile)
    if recipe != "tensorwise" and base == "fp16":
        raise ValueError(
            f"`base='fp16'` is not valid with `recipe={recipe!r}`, whose kernels round their output through bf16;"
            " use `base='bf16'` or `recipe='tensorwise'`."
        )
    if recipe != "tensorwise" and fp8_format == "hybrid":
        raise ValueError(
            f"`fp8_format='hybrid'` is not valid with `recipe={recipe!r}`, which uses e4m3 everywhere; use"
            " `fp8_format='e4m3'` or `recipe='tensorwise'`."
        )


def _check_choice(field: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"`{field}={value!r}` is not valid; expected one of: {', '.join(map(str, allowed))}.")


def _check_compile(compile: object) -> None:
    if compile != "auto" and not isinstance(compile, (bool, Mapping)):
        raise ValueError(
            f"`compile={compile!r}` is not valid; expected 'auto', True, False or a mapping of torch.compile options."
        )
