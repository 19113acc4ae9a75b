"""Convert layers in place, change their products during a run, and give torch's layers back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.gemms import NO_GEMM, InBF16
from lightning_lowprec.conversion.matmuls import is_conv1d, sizes_of_conv1d
from lightning_lowprec.conversion.recipe_map import LayerRecipe
from lightning_lowprec.torchao_prototype.arithmetic import Kind
from lightning_lowprec.torchao_prototype.layer import PrototypeLayer, PrototypeLinear


def convert(
    model: nn.Module, fqns: Sequence[str], kind: Kind, gemms_of: Callable[[str], InBF16], *, low_eval: bool
) -> None:
    """Make the layers named by ``fqns`` PrototypeLayers, in place.

    Args:
        model: changed in place; parameters stay the same objects.
        fqns: Linears, and Conv1Ds of transformers.
        kind: the arithmetic of their products.
        gemms_of: returns the products that a layer computes in high precision, by its fqn.
        low_eval: whether evaluation runs on codes too.
    """
    for fqn in fqns:
        layer = model.get_submodule(fqn)
        gemms = gemms_of(fqn)
        own: dict[str, Any] = {"arithmetic": kind, "low_eval": low_eval, "own_gemms": gemms, "phase_gemms": NO_GEMM}
        own |= {"in_high": tuple(sorted(gemms))}
        if not is_conv1d(layer):
            in_place.become(layer, PrototypeLinear, own)
            continue
        from lightning_lowprec.torchao_prototype.conv1d import PrototypeConv1D

        in_place.become(layer, PrototypeConv1D, {**own, **sizes_of_conv1d(layer)})


def revert(model: nn.Module) -> None:
    """Give every PrototypeLayer of ``model`` its own class back, in place."""
    for layer in layers_of(model):
        in_place.revert(layer)


def layers_of(model: nn.Module) -> list[PrototypeLayer]:
    """Return the layers of ``model`` that are converted."""
    return [module for module in model.modules() if isinstance(module, PrototypeLayer)]


def reconfigure(layer: nn.Module, recipe: LayerRecipe) -> None:
    """Give a PrototypeLayer another choice of products; call this between two optimizer steps.

    Args:
        layer: a PrototypeLayer.
        recipe: ``name`` is the arithmetic that the layer has, or None.

    Raises:
        ValueError: ``recipe`` has the name of another arithmetic.
    """
    assert isinstance(layer, PrototypeLayer)
    has = layer.arithmetic.partition("_")[0]
    if recipe.name not in (None, has):
        raise ValueError(
            f"`recipe={recipe.name!r}` is not possible for a layer of {has!r}, whose arithmetic stays for the whole"
            f" run; expected {has!r}, 'bf16', or a mapping such as {{'forward': 'bf16'}}."
        )
    layer.own_gemms = recipe.in_bf16
    layer.update()


def set_phase(layer: nn.Module, gemms: InBF16) -> None:
    """Compute these products of a layer in high precision, beside those of the layer's recipe."""
    assert isinstance(layer, PrototypeLayer)
    layer.phase_gemms = gemms
    layer.update()
