"""Convert layers in place, and back: hooks, flags, parameters, their order and ties stay; say how layers round.

(torchao's own swap builds a new module and loses hooks and the eval flag.) Importing this module imports torchao.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from lightning_lowprec.conversion import in_place, layer_runs
from lightning_lowprec.conversion.declared import is_declared
from lightning_lowprec.conversion.experts import release_experts
from lightning_lowprec.conversion.matmuls import is_conv1d, sizes_of_conv1d
from lightning_lowprec.numerics import fp8_matrices
from lightning_lowprec.numerics.casts import EVALUATES, HIGH, Cast, LayerNumerics
from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.kernel_operands import cut_rows, pad_rows
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.tensor_cores import UNITS
from lightning_lowprec.numerics.weight_rounding import ScalePer, WeightRounding
from lightning_lowprec.private.torch import are_transforms_active, local_tensor
from lightning_lowprec.products.arithmetic import Coding, Products
from lightning_lowprec.products.coded_weight import CodedWeight
from lightning_lowprec.products.formats import FORMATS
from lightning_lowprec.products.linear import linear
from lightning_lowprec.products.scaled import Scaled
from lightning_lowprec.products.transforms import check_backward, check_call, refuse_layout
from lightning_lowprec.torchao import frozen
from lightning_lowprec.torchao.experts import FP8Experts, fp8_experts
from lightning_lowprec.torchao.frozen import StoresCodes
from lightning_lowprec.torchao.settings import LayerSettings, example
from lightning_lowprec.torchao.wire_format import TorchAOWire


class CodedLayer(StoresCodes):
    """A layer whose products run on codes, for any batch, under autocast of any device."""

    in_features: int
    out_features: int
    weight: Tensor
    bias: Any
    fp8_eval: bool
    """Whether evaluation runs on codes too."""
    settings: LayerSettings
    """The recipe of the layer."""
    alignment: int
    """Zeros are appended to K and N until both are multiples of this number."""
    products: Products | None
    """How the layer computes now; None: all products are in high precision. A compiler guards it."""

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, N] in the autocast dtype, or in the input's where autocast is off."""
        if not torch.compiler.is_compiling() and layer_runs.waiting:
            layer_runs.note_run(self)
        if input.shape[-1:] != (self.in_features,) or not input.is_floating_point():
            return self.plain_forward(input)  # raises as nn.Linear does
        products = self.products if self.training or self.fp8_eval else None
        if input.layout is not torch.strided:
            refuse_layout(input, type(self).__name__)
        if type(input) is not Tensor:
            one_scale = self.settings.codes_serve_both and self.settings.config is not None
            check_coded_input(input, in_fp8=products is not None, one_scale=one_scale)
        if products is None or input.numel() == 0:
            return self.plain_forward(input)
        # eager inference mode shows torchao's tensors operations that they do not know (aten.to.dtype)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(input)
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            input = input.to(torch.get_autocast_dtype(device_type))
        elif is_declared(self):
            return self.declared_forward(input)
        if are_transforms_active() or torch.compiler.is_exporting():
            check_call(type(self).__name__)
        weight = self.weight
        if isinstance(weight, DTensor) or isinstance(input, CUT):
            return linear_by_torchao(self, input, weight if products.in_by_out else weight.t())
        rows, columns = weight.shape  # other ones than at the conversion, if the program has pruned the layer
        if rows % self.alignment or columns % self.alignment:
            return self._padded(input, weight, products)
        scale = None
        if self.values_dtype is not None:
            weight, scale = self.codes_of(weight)
        hint = fp8_matrices.hint_of(weight) if weight.numel() >= fp8_matrices.LARGE else None
        return linear(input, weight, scale, self.bias, products, hint)

    def _padded(self, input: Tensor, weight: Tensor, products: Products) -> Tensor:
        """[*, K] -> [*, N], with zeros behind K and N."""
        features = weight.shape if products.in_by_out else weight.shape[::-1]
        k, n = (-size % self.alignment for size in features)
        weight = F.pad(weight, (0, n, 0, k) if products.in_by_out else (0, k, 0, n))
        bias = None if self.bias is None else F.pad(self.bias, (0, n))
        rows = F.pad(input, (0, k))
        output = linear(rows, *self.codes_of(weight), bias, products)
        if not n:
            return output
        # a copy and no view: a model may write to it
        return output[..., : features[1]].clone(memory_format=torch.contiguous_format)

    def set_products(self, *, saves_weight_codes: bool) -> None:
        """Set ``products``; the backward reads no codes that the forward made of a weight that is freed between."""
        of_recipe = self.settings.products
        saves_weight = of_recipe.saves_weight and saves_weight_codes
        products = replace(of_recipe, in_by_out=is_conv1d(self), saves_weight=saves_weight)
        self.products = products.without(self.settings.in_bf16)

    # ---- FSDP2

    @property
    def wire_format(self) -> TorchAOWire | None:
        """The format in which FSDP2 gathers the weight; None: padded, stored as codes, or two sets of codes."""
        return None if self.is_padded or self.values_dtype is not None else self.settings.wire_format

    @property
    def is_padded(self) -> bool:
        """Whether zeros are appended to K or N."""
        return bool(self.in_features % self.alignment or self.out_features % self.alignment)


@final
class FP8Linear(CodedLayer, Float8Linear):
    """A Linear whose products run in FP8; a ``Float8Linear`` for torchao's styles of tensor parallelism."""


@final
class CodedLinear(CodedLayer, nn.Linear):
    """A Linear whose products run in a format that torchao's ``Float8Linear`` does not have."""

    def extra_repr(self) -> str:
        """Show the sizes, as Linear does, and the products."""
        return f"{nn.Linear.extra_repr(self)}, {self.products}"


@final
class CodedConv1D(CodedLayer):
    """transformers' ``Conv1D`` (GPT-2) whose products run on codes; the class of a layer derives from both."""

    def __repr__(self) -> str:
        """Show the sizes, as Conv1D does."""
        return f"CodedConv1D(nf={self.out_features}, nx={self.in_features})"


def convert(
    model: nn.Module, fqns: Sequence[str], settings_of: Callable[[str], LayerSettings], *, fp8_eval: bool
) -> None:
    """Make the layers named by ``fqns`` CodedLayers, in place; ``settings_of`` returns the settings of an fqn."""
    convert_to_float8_training(nn.Identity())  # applies torchao's process-wide compiler fixes
    for fqn in fqns:
        layer = model.get_submodule(fqn)
        settings = settings_of(fqn)
        sizes = sizes_of_conv1d(layer) if is_conv1d(layer) else {}
        attributes = {
            **({} if settings.config is None else vars(example(settings.config))),
            **sizes,
            "alignment": FORMATS[settings.name].features,
            "fp8_eval": fp8_eval,
            "settings": settings,
            "values_dtype": None,
            "tied": (),
            "products": None,
        }
        cls = CodedLinear if settings.config is None else FP8Linear
        in_place.become(layer, in_place.derived(CodedConv1D, type(layer)) if sizes else cls, attributes)
        assert isinstance(layer, CodedLayer)
        layer.set_products(saves_weight_codes=True)
        fp8_matrices.ask(layer.weight)


def save_no_weight_codes(model: nn.Module) -> None:
    """Save no codes of weights for the backward: whole weights are gathered for each use, and freed."""
    for layer in coded_layers(model):
        layer.set_products(saves_weight_codes=False)
    for experts in fp8_experts(model):
        experts.saves_weight_codes = False


def coded_layers(model: nn.Module) -> list[CodedLayer]:
    """Return the layers of ``model`` that are converted."""
    return [module for module in model.modules() if isinstance(module, CodedLayer)]


def revert(model: nn.Module) -> None:
    """Give layers and experts their own classes back, in place."""
    for module in fp8_experts(model):
        release_experts(module)
    frozen.restore(model)
    for layer in coded_layers(model):
        in_place.revert(layer)


def cuts(layer: nn.Module) -> bool:
    """Return whether a layer computes with DTensors: torchao's ``Float8Linear`` knows its format."""
    return not isinstance(layer, CodedLayer) or layer.settings.config is not None


# ---- how tensors are rounded, for the monitor


def numerics_of(layer: nn.Module) -> LayerNumerics | str:
    """Return the casts of a Linear by those of its products that run in FP8; inside of a forward under FSDP2."""
    if not isinstance(layer, CodedLayer):
        return "its products are inside of the module"
    if not isinstance(layer.settings.products.forward, Scaled):
        return "its scales belong to rows and columns, or to blocks of values, and change with each product"
    if is_conv1d(layer):
        return "a Conv1D"
    if (by := layer.products) is None:
        return HIGH
    if not (layer.training or layer.fp8_eval):
        return EVALUATES
    weight = layer.weight
    of_weight = _cast(by.forward or by.grad_input, "weight")
    if isinstance(weight, CodedWeight) and isinstance(of_weight, Cast):
        of_weight = Cast(dtype=of_weight.dtype, scale_of=lambda amax: weight.codes_and_scale()[1])
    return LayerNumerics(
        input=_cast(by.forward or by.grad_weight, "input"),
        weight=of_weight,
        gradient=_cast(by.grad_input or by.grad_weight, "gradient"),
        values=None if isinstance(weight, CodedWeight) else layer.values(),
    )


def _cast(how: object, role: str) -> Cast | str:
    if how is None:
        return HIGH
    coding: Coding = getattr(how, role)
    return Cast(dtype=coding.dtype, scale_of=lambda amax: _scales(amax, coding), by_row=coding.by_row)


@compiled_on_cuda
def _scales(amax: Tensor, coding: Coding) -> Tensor:
    return coding.scales(amax)


# ---- how weights are rounded, for export


def weight_roundings(layer: nn.Module) -> Mapping[str, WeightRounding | None]:
    """Return the roundings of weights that the forward reads as codes, by name; None: no server's format has them."""
    if isinstance(layer, CodedLayer):
        every = {"weight": layer.settings}
    else:
        every = layer.settings if isinstance(layer, FP8Experts) else {}
    return {
        name: settings.products.forward.weight_rounding()
        for name, settings in every.items()
        if settings.products.forward is not None and "forward" not in settings.in_bf16
    }


def rounding_of(scale_per: ScalePer | None, power_of_2: bool) -> WeightRounding | None:
    """Return torchao's rounding of weights; None: no server's format has these codes."""
    if scale_per is None:
        return None
    coding = Coding(dtype=E4M3.dtype, by_row=scale_per == "row", power_of_2=power_of_2)
    return WeightRounding(scale_per=scale_per, scale_of=coding.scales)


# ---- tensor parallelism, which cuts weights (DTensors): torchao's own function computes such layers

STYLES = "`Float8ColwiseParallel`, `Float8RowwiseParallel` or `PrepareFloat8ModuleInput`"
_TOKENS = 16
CUT: Final = (DTensor, Float8TrainingTensor)
"""The classes of inputs that come from tensor parallelism.

torchao's ``Float8ColwiseParallel`` and its siblings also send activations between ranks as float8 codes with one scale,
whatever the recipe of the layer is.
"""


def linear_by_torchao(layer: Any, input: Tensor, weight_t: Tensor) -> Tensor:
    """[*, K] -> [*, N] in the dtype of ``input``, by a weight [K, N]; refuse what does not run if it is cut."""
    if (refusal := _refusal(layer)) is not None:
        raise RuntimeError(f"{refusal[0]} (got a DTensor of shape {tuple(layer.weight.shape)}). {refusal[1]}")
    fits = input.numel() // input.shape[-1] % _TOKENS == 0
    # with a scale per row torchao reshapes codes, which works for contiguous codes
    rows = input.contiguous() if fits else pad_rows(input, _TOKENS)
    output: Tensor = _Matmul.apply(rows, weight_t, layer.settings.mm_config, layer.settings.config)  # type: ignore[no-untyped-call]
    if layer.bias is not None:
        output = output + layer.bias.to(output.dtype)
    return output if fits else cut_rows(output, input)


def _refusal(layer: Any) -> tuple[str, str] | None:
    cut = "does not run with tensor parallelism, which cuts the weight"
    if layer.values_dtype is not None:
        return f"A frozen weight that is stored as codes {cut}", "Use `frozen='convert'`."
    if layer.settings.config is None:
        return f"{type(layer).__name__} {cut}", "Use 'fp8-hybrid', or keep what is cut (`keep=[...]`)."
    if by_name := {getattr(by, "emulate", None) for by in vars(layer.settings.products).values()} & UNITS.keys():
        return f"`emulate={by_name.pop()!r}` {cut}", "Use `emulate=True`."
    if layer.is_padded:
        return f"A layer whose features are padded {cut}", "Leave `pad_inner_dim` out, or `keep=[...]` the layer."
    if layer.settings.in_bf16:
        return f"A layer with some GEMMs in bf16 {cut}", "Choose all GEMMs: 'bf16', or the recipe without `gemms`."
    return None


@final
@torch.compiler.allow_in_graph
class _Matmul(matmul_with_hp_or_float8_args):
    """torchao's matmul in FP8: [*, K] @ [K, N] -> [*, N], with a backward pass that has a gradient itself."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        output: Tensor = matmul_with_hp_or_float8_args.forward(ctx, *args)
        return output.data  # no view: a model may write to it, as Falcon does

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return matmul_with_hp_or_float8_args.backward(ctx, grad_output)  # type: ignore[no-any-return,no-untyped-call]
        input, weight_t = ctx.saved_tensors
        if isinstance(weight_t, CodedWeight):
            check_backward("FP8Linear under FSDP2", "Use 'ddp'.")
        grad_output = grad_output.to(input.dtype)
        grad_input = grad_output @ weight_t.t().to(input.dtype)  # [*, N] @ [N, K] -> [*, K]
        rows, grad_rows = input.flatten(0, -2), grad_output.flatten(0, -2)
        return grad_input, (rows.t() @ grad_rows).to(weight_t.dtype), None, None  # [K, M] @ [M, N] -> [K, N]


def check_coded_input(input: Tensor, *, in_fp8: bool, one_scale: bool) -> None:
    """Raise RuntimeError if ``input`` is codes, and the layer does not multiply codes with one scale (now)."""
    if not isinstance(local_tensor(input), Float8TrainingTensor) or (in_fp8 and one_scale):
        return
    got = f"An FP8 layer got an input of shape {tuple(input.shape)} that is float8 codes with one scale"
    if not in_fp8:
        raise RuntimeError(
            f"{got}, and computes in high precision now. Use `FP8TorchAO(fp8_eval=True)`, or torch's own"
            f" styles in place of {STYLES}."
        )
    raise RuntimeError(
        f"{got}, and the recipe of the layer has a scale per row. Use `FP8TorchAO(recipe='tensorwise')`, or torch's"
        f" `ColwiseParallel`, `RowwiseParallel` or `PrepareModuleInput` in place of {STYLES}."
    )
