"""Linear layers whose three GEMMs run in FP8 through torchao; scales are computed from each tensor.

    output      = input       @ weight.T        # [M, K] @ [K, N] -> [M, N]
    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]

Conversion changes the class of the Linear in place: hooks, flags, parameters, their order and ties stay. (torchao's own
swap builds a new module and loses hooks and the eval flag.)

The kernels need inner dimensions that are multiples of 16. The plan checks K and N. M, the number of tokens, is an
inner dimension of ``grad_weight``: zero rows are appended to a batch and cut off again. Zero rows change no amax and
add nothing to any sum, so the result is that of the batch without them.

Importing this module imports torchao (about 3 s).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.gemms import GEMMS, NO_GEMM, Gemm, InBF16
from lightning_lowprec.conversion.transforms import check_backward, check_call
from lightning_lowprec.numerics.encode import Encoded
from lightning_lowprec.numerics.padding import cut_rows, pad_rows
from lightning_lowprec.private.torch import are_transforms_active
from lightning_lowprec.private.torch_modules import before_compiled_call
from lightning_lowprec.torchao import mixed_gemms, rowwise_backward, saved_codes
from lightning_lowprec.torchao.coded import CodedMatmul
from lightning_lowprec.torchao.experts import FP8Experts, fp8_experts
from lightning_lowprec.torchao.gathered_weight import GatheredWeight
from lightning_lowprec.torchao.rowwise_backward import ScaledInside
from lightning_lowprec.torchao.settings import LayerSettings, Settings
from lightning_lowprec.torchao.weight_codes import ModelCodes, WeightCodes
from lightning_lowprec.torchao.wire_format import TorchAOWire

_checked: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Compiled modules, and their compiled calls with a check of kept codes before them; a call holds its module."""
TOKEN_ALIGNMENT = 16
"""Tokens (product of all but the last dimension) that the kernels take are multiples of this."""


@final
@torch.compiler.allow_in_graph
class _Matmul(matmul_with_hp_or_float8_args):
    """torchao's matmul in FP8: [*, K] @ [K, N] -> [*, N], with a backward pass that has a gradient itself."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients in FP8, or in high precision where they will be differentiated."""
        if not torch.is_grad_enabled():
            if isinstance(ctx.config, ScaledInside) and not ctx.config.emulate:  # emulated products are scaled inside
                return rowwise_backward.backward(ctx, grad_output)
            in_fp8: Any = matmul_with_hp_or_float8_args
            return in_fp8.backward(ctx, grad_output)  # type: ignore[no-any-return]
        input, weight_t = ctx.saved_tensors
        if isinstance(weight_t, GatheredWeight):
            check_backward("FP8Linear under FSDP2", "Use 'ddp'.")
        grad_output = grad_output.to(input.dtype)
        grad_input = grad_output @ weight_t.t().to(input.dtype)  # [*, N] @ [N, K] -> [*, K]
        rows, grad_rows = input.flatten(0, -2), grad_output.flatten(0, -2)
        return grad_input, (rows.t() @ grad_rows).to(weight_t.dtype), None, None  # [K, M] @ [M, N] -> [K, N]


@final
class FP8Linear(Float8Linear):
    """A Linear with FP8 GEMMs, for any batch, under autocast of any device."""

    fp8_eval: bool
    weight_codes: WeightCodes | None
    """Codes that are kept from step to step; None encodes the weight at every GEMM, as torchao does."""
    saves_codes: bool
    """Whether the codes of the input are kept for the backward, in place of the input."""
    encoded_per_step: bool
    """Whether the weight, or FSDP2's shards of it, are encoded once per optimizer step, or at every use."""
    settings: Settings | None
    """The options by which other recipes for this layer are made; None: the layer has the user's config."""
    own_gemms: InBF16
    """The products that the recipe of the layer computes in high precision."""
    phase_gemms: InBF16
    """The products that the phase of a schedule computes in high precision."""
    in_bf16: tuple[Gemm, ...]
    """The products in high precision, of recipe and phase together."""

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, N] in the autocast dtype, or in the input's without autocast."""
        if input.shape[-1:] != (self.in_features,) or not input.is_floating_point():
            return F.linear(input, self.weight, self.bias)  # raises as nn.Linear does
        in_bf16 = self.in_bf16
        if not (self.training or self.fp8_eval) or input.numel() == 0 or len(in_bf16) == len(GEMMS):
            return F.linear(input, self.weight, self.bias)
        # eager inference mode shows torchao's tensors operations that they do not know (aten.to.dtype)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(input)
        given, device_type = input, input.device.type
        if torch.is_autocast_enabled(device_type):  # torchao asks for CUDA's autocast only
            input = input.to(torch.get_autocast_dtype(device_type))
        if are_transforms_active() or torch.compiler.is_exporting():
            check_call(type(self).__name__)
        if in_bf16:
            return mixed_gemms.matmul(self, given, input)
        fits = input.numel() // self.in_features % TOKEN_ALIGNMENT == 0
        rows = input if fits else pad_rows(input, TOKEN_ALIGNMENT)
        codes = self.weight_codes
        if codes is not None and not self._may_use(codes):
            codes = None
        if self.saves_codes:
            output = self._saving_codes(given, rows, codes)
        elif codes is None:
            output = _Matmul.apply(rows, self.weight.t(), self.linear_mm_config, self.config)  # type: ignore[no-untyped-call]
        else:
            output = self._with_codes(rows, codes)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        return output if fits else cut_rows(output, input)

    def _with_codes(self, rows: Tensor, codes: WeightCodes) -> Tensor:
        config, made = self.config, codes.made
        gradients, power_of_2 = config.cast_config_grad_output.target_dtype, config.round_scales_to_power_of_2
        output: Tensor = CodedMatmul.apply(  # type: ignore[no-untyped-call]
            rows, self.weight, made.rows, made.columns, made.scale, gradients, power_of_2, config.emulate
        )
        return output

    def _saving_codes(self, input: Tensor, rows: Tensor, codes: WeightCodes | None) -> Tensor:
        config = self.config
        return saved_codes.matmul(
            input,
            rows,
            self.weight,
            None if codes is None else codes.made,
            gradients=config.cast_config_grad_output.target_dtype,
            power_of_2=config.round_scales_to_power_of_2,
            emulate=config.emulate,
        )

    def _may_use(self, codes: WeightCodes) -> bool:
        """Return whether kept codes can be used, after bringing them up to date."""
        if torch.compiler.is_compiling():
            return codes.checked_outside
        return self.check_codes(codes)

    def check_codes(self, codes: WeightCodes) -> bool:
        """Bring kept codes up to date; drop them if they are not of this weight, because it was replaced or sharded."""
        if codes.weight is not self.weight or self.weight.is_meta:
            self.weight_codes = None
        elif codes.is_stale(training=self.training):
            codes.model.refresh()
        return self.weight_codes is not None

    def kept_weight_codes(self) -> Encoded | None:
        """Return the codes of the weight that are kept, brought up to date; None: the weight is encoded when used."""
        codes = self.weight_codes
        return codes.made if codes is not None and self._may_use(codes) else None

    @property
    def reads_values(self) -> bool:
        """Whether a product that reads the weight runs in high precision: FSDP2 then gathers the values."""
        return "forward" in self.in_bf16 or "grad_input" in self.in_bf16 or not self._has_one_scale

    @property
    def _has_one_scale(self) -> bool:
        casts = self.config.cast_config_weight, self.config.cast_config_weight_for_grad_input
        return all(cast.scaling_granularity is ScalingGranularity.TENSORWISE for cast in casts)

    def all_codes(self) -> list[WeightCodes]:
        """Return the kept codes of the weight, if there are some."""
        codes = vars(self).get("weight_codes")
        return [] if codes is None else [codes]

    @property
    def wire_format(self) -> TorchAOWire | None:
        """The format in which FSDP2 may gather the weight; None: the weight has a scale per row."""
        if not self._has_one_scale:
            return None
        return TorchAOWire(self.linear_mm_config, self.config.cast_config_weight.target_dtype, self.encoded_per_step)


def convert(
    model: nn.Module, fqns: Sequence[str], settings_of: Callable[[str], LayerSettings], *, fp8_eval: bool
) -> None:
    """Make the Linears named by ``fqns`` FP8Linears, in place; ``settings_of`` returns the settings of an fqn."""
    convert_to_float8_training(nn.Identity())  # applies torchao's process-wide compiler fixes
    for fqn in fqns:
        configure(model.get_submodule(fqn), settings_of(fqn), fp8_eval=fp8_eval)


def configure(linear: nn.Module, settings: LayerSettings, *, fp8_eval: bool) -> None:
    """Make ``linear`` an FP8Linear with these settings, in place."""
    own = {"fp8_eval": fp8_eval, "weight_codes": None, "phase_gemms": NO_GEMM, **settings.attributes()}
    in_place.become(linear, FP8Linear, own)


def keep_codes(model: nn.Module) -> None:
    """Let the FP8Linears of ``model`` keep the codes of their weights from step to step, also within compiled modules.

    Compiled code does not check whether codes are current. The check runs before each call of a compiled module.
    """
    layers, stacks = _encoded_per_step(model)
    if not layers and not stacks:
        return
    config: Any = layers[0].config if layers else next(iter(stacks[0].recipes.values()))
    codes = ModelCodes(power_of_2=config.round_scales_to_power_of_2, kernel=not config.emulate)
    for layer in layers:
        layer.weight_codes = codes.add(layer)
    for stack in stacks:
        stack.weight_codes = {name: codes.add(stack, name) for name in stack.encoded_per_step()}
    for compiled in _outermost_compiled(model):
        below, beside = _encoded_per_step(compiled)
        inside: list[FP8Linear | FP8Experts] = [*below, *beside]
        known = _checked.get(compiled)
        if known is None or known() is not compiled._compiled_call_impl:
            before_compiled_call(compiled, partial(check_codes, inside))
            _checked[compiled] = weakref.ref(compiled._compiled_call_impl)
        for kept in itertools.chain.from_iterable(layer.all_codes() for layer in inside):
            kept.checked_outside = True


def check_codes(layers: Sequence[FP8Linear | FP8Experts]) -> None:
    """Bring kept codes of ``layers`` up to date."""
    for layer in layers:
        for codes in layer.all_codes():
            if codes.is_read:
                layer.check_codes(codes)


def _encoded_per_step(model: nn.Module) -> tuple[list[FP8Linear], list[FP8Experts]]:
    layers = [layer for layer in fp8_linears(model) if layer.encoded_per_step]
    return layers, [stack for stack in fp8_experts(model) if stack.encoded_per_step()]


def _outermost_compiled(module: nn.Module) -> Iterator[nn.Module]:
    if getattr(module, "_compiled_call_impl", None) is not None:
        yield module
        return
    for child in module.children():
        yield from _outermost_compiled(child)


def revert(model: nn.Module) -> None:
    """Make every FP8Linear of ``model`` a Linear again, in place."""
    for linear in fp8_linears(model):
        in_place.revert(linear)


def fp8_linears(model: nn.Module) -> list[FP8Linear]:
    """Return the layers of ``model`` that are converted."""
    return [module for module in model.modules() if isinstance(module, FP8Linear)]
