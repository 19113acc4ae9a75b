"""Convert layers in place, and back: hooks, flags, parameters, their order and ties stay.

(torchao's own swap builds a new module and loses hooks and the eval flag.) Importing this module imports torchao.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.matmuls import is_conv1d, sizes_of_conv1d
from lightning_lowprec.products.formats import FORMATS
from lightning_lowprec.torchao.experts import fp8_experts
from lightning_lowprec.torchao.layer import CodedLayer
from lightning_lowprec.torchao.settings import LayerSettings


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
        layer: Any = model.get_submodule(fqn)
        settings = settings_of(fqn)
        sizes = sizes_of_conv1d(layer) if is_conv1d(layer) else {}
        attributes = {
            **settings.torchao_attributes,
            **sizes,
            "alignment": FORMATS[settings.name].features,
            "fp8_eval": fp8_eval,
            "settings": settings,
            "saves_weight_codes": True,
            "values_dtype": None,
            "in_bf16": (),
            "products": None,
        }
        cls = CodedLinear if settings.config is None else FP8Linear
        in_place.become(layer, in_place.derived(CodedConv1D, type(layer)) if sizes else cls, attributes)
        layer.update()


def save_no_weight_codes(model: nn.Module) -> None:
    """Save no codes of weights for the backward: whole weights are gathered for each use, and freed."""
    for layer in coded_layers(model):
        layer.saves_weight_codes = False
        layer.update()
    for experts in fp8_experts(model):
        experts.saves_weight_codes = False


def revert(model: nn.Module) -> None:
    """Give every CodedLayer of ``model`` its own class back, in place."""
    for layer in coded_layers(model):
        in_place.revert(layer)


def coded_layers(model: nn.Module) -> list[CodedLayer]:
    """Return the layers of ``model`` that are converted."""
    return [module for module in model.modules() if isinstance(module, CodedLayer)]
