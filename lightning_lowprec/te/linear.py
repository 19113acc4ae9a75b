"""Make a torch Linear a Transformer Engine Linear, in place: the module and its Parameters stay the same objects."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor, nn

from lightning_lowprec.conversion.in_place import become, revert
from lightning_lowprec.conversion.matmuls import is_conv1d, linears
from lightning_lowprec.numerics.wire_format import WireFormat
from lightning_lowprec.private import transformer_engine
from lightning_lowprec.te.fp8_weight import Fp8Weight, store_in_fp8, store_in_full
from lightning_lowprec.te.layer import TELayer, WeightCache


@final
class TELinear(TELayer, nn.Linear):
    """A Linear with Transformer Engine's GEMMs."""

    in_by_out = False
    reset_parameters = nn.Linear.reset_parameters
    extra_repr = nn.Linear.extra_repr

    def _plain(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


def convert_linears(
    model: nn.Module,
    fqns: Collection[str],
    *,
    fp8_eval: bool,
    token_alignment: int,
    weight_cache: bool | Literal["always"],
    wire_format: WireFormat | None = None,
    custom: bool = False,
) -> None:
    """Make the Linears and Conv1Ds named by ``fqns`` TELayers with these options, and all other TELayers plain again.

    With a custom recipe torch adds the bias: Transformer Engine's own backward of a bias quantises ``grad_output`` in
    the same kernel, which takes Transformer Engine's own quantizers only.
    """
    for layer in te_linears(model):
        store_in_full(layer)
    linear: Any
    for fqn, linear in list(linears(model).items()):
        if fqn not in fqns:
            if isinstance(linear, TELayer):
                revert(linear)
            continue
        bias = linear.bias is not None
        attributes: dict[str, Any] = {
            "fp8_eval": fp8_eval,
            "token_alignment": token_alignment,
            "wire_format": None if is_conv1d(linear) else wire_format,
            "weight_cache": WeightCache(always=weight_cache == "always") if weight_cache else None,
            "own_recipe": None,
            "gemm_bias_unfused_add": custom and bias,
            "param_init_meta": {},  # Transformer Engine's holds closures, which do not pickle
            "_fp8_workspaces": {},  # weights that were kept under other options may never be used again
        }
        if not isinstance(linear, TELayer):
            _become_te(linear, fqn, later=attributes)
        for name in transformer_engine.SHARDING_CACHES:
            vars(linear).pop(name, None)
        vars(linear).update(attributes)


def _become_te(linear: Any, fqn: str, later: Iterable[str]) -> None:
    cls: type[nn.Module] = TELinear
    sizes = linear.weight.shape[::-1]
    if is_conv1d(linear):
        from lightning_lowprec.te.conv1d import TEConv1D

        cls, sizes = TEConv1D, linear.weight.shape
    options = {"bias": linear.bias is not None, "params_dtype": linear.weight.dtype, "name": fqn or None}
    made = te.Linear(*sizes, device="meta", **options)
    become(linear, cls, vars(made), later=(*later, *transformer_engine.SET_BY_FORWARD))


def revert_linear(linear: nn.Module) -> None:
    """Give a TELayer its own class back, in place."""
    store_in_full(linear)
    revert(linear)


def store_frozen_in_fp8(model: nn.Module, device: torch.device) -> None:
    """Store the weights of TELinears that do not train in FP8 alone, on ``device``; weights on meta stay.

    The codes of a Conv1D would be transposed at each forward, so a Conv1D keeps its values.
    """
    for layer in te_linears(model):
        if layer.in_by_out:
            continue
        weight = layer._parameters.get("weight")  # no Parameter where `weight_norm` computes it
        if weight is not None and not (weight.requires_grad or weight.is_meta or isinstance(weight, Fp8Weight)):
            store_in_fp8(layer, device)


def te_linears(model: nn.Module) -> list[TELayer]:
    """Return the Linears and Conv1Ds of ``model`` that are converted."""
    return [module for module in model.modules() if isinstance(module, TELayer)]
