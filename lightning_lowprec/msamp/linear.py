"""Convert layers to MS-AMP's and back, in place: their weights become codes (:mod:`~lightning_lowprec.msamp.layer`)."""

from collections.abc import Mapping, Sequence
from typing import Final, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.matmuls import is_conv1d, is_linear, sizes_of_conv1d
from lightning_lowprec.conversion.selection import own_work
from lightning_lowprec.msamp.ddp import include_again
from lightning_lowprec.msamp.layer import ScaledLayer
from lightning_lowprec.msamp.weight import revert_weight_, scale_weight_, values_of
from lightning_lowprec.msamp.weight_state import Level, msamp_state_of
from lightning_lowprec.numerics.casts import EVALUATES, Cast, LayerNumerics
from lightning_lowprec.numerics.formats import E4M3, E5M2, power_of_two_scale
from lightning_lowprec.numerics.one_pass import compiled_on_cuda
from lightning_lowprec.numerics.tensor_cores import Emulation
from lightning_lowprec.numerics.weight_rounding import WeightRounding


@final
class ScaledLinear(ScaledLayer, nn.Linear):
    """A Linear whose weight is kept as codes."""


@final
class ScaledConv1D(ScaledLayer):
    """transformers' ``Conv1D`` (GPT-2) whose weight is kept as codes; the class of a layer derives from both."""

    in_by_out = True

    def __repr__(self) -> str:
        return f"ScaledConv1D(nf={self.out_features}, nx={self.in_features})"


def scale_linears(
    model: nn.Module,
    fqns: Sequence[str],
    level: Level,
    *,
    emulate: Emulation | None = None,
    fp8_eval: bool = True,
    float32_gradients: bool = False,
) -> None:
    """Turn Linears and Conv1Ds into ScaledLayers, in place; Parameters stay the same objects.

    The optimizer is ``ScaledAdamW`` of the same level. The options are those of
    :class:`~lightning_lowprec.msamp.layer.ScaledLayer`; ``emulate=None`` emulates on CPU only. An fqn is that of
    ``model.named_modules()``, ``""`` the model itself.

    Raises:
        TypeError: a name is not that of a layer whose work is exactly that of an ``nn.Linear``, or a hook computes the
            weight.
        ValueError: a weight that is shared with a module outside of ``fqns``.
    """
    for fqn in fqns:  # all are checked before one is changed
        _check_linear(fqn, model.get_submodule(fqn))
    _check_ties(model, fqns)
    for fqn in fqns:
        linear = model.get_submodule(fqn)
        if msamp_state_of(linear.weight) is None:  # two layers of `fqns` may have one weight
            assert isinstance(linear.weight, nn.Parameter)
            scale_weight_(linear.weight, level)
        options = {
            "emulate": linear.weight.device.type == "cpu" if emulate is None else emulate,
            "fp8_eval": fp8_eval,
            "float32_gradients": float32_gradients,
        }
        if is_conv1d(linear):
            cls = in_place.derived(ScaledConv1D, type(linear))
            in_place.become(linear, cls, {**sizes_of_conv1d(linear), **options})
        else:
            in_place.become(linear, ScaledLinear, options)


def _check_linear(fqn: str, linear: nn.Module) -> None:
    if own_work(linear) is not None:
        raise TypeError(f"{fqn!r} is a {type(linear).__name__}; expected an nn.Linear. Leave it out of `fqns`.")
    if "weight" not in linear._parameters:
        raise TypeError(
            f"the weight of {fqn!r} is computed at each forward (weight_norm, spectral_norm, pruning); expected a"
            " parameter. Leave it out of `fqns`."
        )


def _check_ties(model: nn.Module, fqns: Sequence[str]) -> None:
    """Raise if a module that is not converted shares a weight: its state dict would have codes."""
    owners: dict[int, list[str]] = {}
    for fqn, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(fqn)
    for fqn in fqns:
        for other in owners[id(model.get_submodule(fqn).weight)]:
            if other not in fqns:
                both = [name for name in (fqn, other) if is_linear(model.get_submodule(name))]
                raise ValueError(
                    f"the weight of {fqn!r} is that of {other!r} too, which would stay in high precision; expected an"
                    f" untied weight, or that both convert. Keep both: `MSAMP(..., keep={both!r})`."
                )


def scaled_linears(model: nn.Module) -> dict[str, ScaledLayer]:
    """The layers of ``model`` that are converted, by fqn."""
    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, ScaledLayer)}


def revert(model: nn.Module) -> None:
    """Give every ScaledLayer its own class back, and make its weight float32.

    Parameter objects stay. Weights that FSDP2 has sharded stay codes.
    """
    coded = [p for p in model.parameters() if msamp_state_of(p) is not None and not isinstance(p, DTensor)]
    for p in coded:
        revert_weight_(p)
    for layer in scaled_linears(model).values():
        if msamp_state_of(layer.weight) is None:
            in_place.revert(layer)
    include_again(model, {id(p) for p in coded})


# ---- how a layer rounds its tensors, for the registry


_ROUNDING: Final = WeightRounding(scale_per="tensor", scale_of=power_of_two_scale)


def rounding() -> WeightRounding:
    """Return how the forward of every layer rounds its weight."""
    return _ROUNDING


_scale: Final = compiled_on_cuda(power_of_two_scale)
_E4M3: Final = Cast(dtype=E4M3.dtype, scale_of=lambda amax: _scale(amax, E4M3))
_E5M2: Final = Cast(dtype=E5M2.dtype, scale_of=lambda amax: _scale(amax, E5M2))


def numerics_of(layer: nn.Module) -> LayerNumerics | str:
    """Return the casts of a layer."""
    if not isinstance(layer, ScaledLinear):
        return "it is no linear layer"
    if not (layer.training or layer.fp8_eval or torch.is_grad_enabled()):
        return EVALUATES
    return LayerNumerics(input=_E4M3, weight=_E4M3, gradient=_E5M2, values=values_of(layer.weight))


def weight_roundings(layer: nn.Module) -> Mapping[str, WeightRounding]:
    """Return how the forward of a layer rounds its weight."""
    return {"weight": _ROUNDING} if isinstance(layer, ScaledLayer) else {}
