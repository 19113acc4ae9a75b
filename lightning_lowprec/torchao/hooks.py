"""What the rest of the package asks of torchao's layers. Importing this module imports torchao."""

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.experts import release_experts
from lightning_lowprec.conversion.matmuls import is_conv1d
from lightning_lowprec.numerics.casts import EVALUATES, HIGH, Cast, LayerNumerics
from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.weight_rounding import ScalePer, WeightRounding
from lightning_lowprec.products.arithmetic import Coding
from lightning_lowprec.products.coded_weight import CodedWeight
from lightning_lowprec.products.scaled import Scaled
from lightning_lowprec.torchao import frozen
from lightning_lowprec.torchao.experts import FP8Experts, fp8_experts
from lightning_lowprec.torchao.linear import CodedLayer, coded_layers


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
    """Return the casts of a Linear in FP8, by its recipe; inside of a forward under FSDP2."""
    if not isinstance(layer, CodedLayer):
        return "its products are inside of the module"
    by = layer.settings.products
    if not isinstance(by.forward or by.grad_input, Scaled):
        return "its scales belong to rows and columns, or to blocks of values, and change with each product"
    if is_conv1d(layer):
        return "a Conv1D"
    if layer.products is None:
        return HIGH
    if not (layer.training or layer.fp8_eval):
        return EVALUATES
    weight = layer.weight
    of_weight = _cast(by.forward, "weight")
    if isinstance(weight, CodedWeight) and isinstance(of_weight, Cast):
        of_weight = Cast(dtype=of_weight.dtype, scale_of=lambda amax: weight.codes_and_scale()[1])
    return LayerNumerics(
        input=_cast(by.forward, "input"),
        weight=of_weight,
        gradient=_cast(by.grad_input, "gradient"),
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
