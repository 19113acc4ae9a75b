"""Give single modules another dtype in a model under autocast.

``recipe={"*.gate": "fp32", ...}`` runs modules in float32. Inputs are cast to float32, autocast is off inside, and the
output stays float32: a router's scores rounded to bf16 would send tokens to other experts. The module's weights are
float32 too (``masters/kept_float32.py``).

Norms with half-precision weights return half precision, so that the residual stream stays half precision: CUDA's
autocast runs torch's LayerNorm, GroupNorm and RMSNorm in float32 and returns float32. Where a block ends with a norm
(BERT), all that follows would be float32: twice the bytes. On CPU autocast returns the input's dtype already.

CPU's autocast casts nothing for norms and LSTMs, which refuse float32 inputs beside half-precision weights there. They
get what CUDA's autocast gives them: the norms run in float32, the LSTMs in half precision.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec.conversion.matmuls import STACKED
from lightning_lowprec.conversion.recipe_map import FLOAT32
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.private.torch import tree_map_only
from lightning_lowprec.private.torch_modules import remove_forward_hook

if TYPE_CHECKING:
    from lightning_lowprec.conversion.plan import Plan

_NORMS: Final = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_REFUSING: Final = (nn.LayerNorm, nn.GroupNorm, nn.LSTM)


def release(model: nn.Module) -> None:
    """Undo all that this file does, in place; weights stay float32."""
    for module in model.modules():
        remove_forward_hook(module, _as_input)
        if getattr(vars(module).get("forward"), "func", None) in (_run, _as_on_cuda):
            del module.forward


def run_in_float32(model: nn.Module, plan: "Plan") -> None:
    """Let the modules that ``plan`` runs in float32 do so, in place; their class, parameters and hooks stay."""
    rows = (row for row in plan.rows if row.recipe == FLOAT32)
    fqns = {row.fqn.rpartition(".")[0] if row.kind == STACKED else row.fqn for row in rows}
    for fqn in fqns:
        module = model.get_submodule(fqn)
        module.forward = partial(_run, module)
        for parameter in module.parameters():
            if parameter.dtype in HALF_DTYPES:
                parameter.data = parameter.data.float()


def _run(module: nn.Module, *args: object, **kwargs: object) -> object:
    tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
    args, kwargs = tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALF_DTYPES else t, (args, kwargs))
    with torch.autocast(tensors[0].device.type if tensors else "cpu", enabled=False):
        return type(module).forward(module, *args, **kwargs)


def hold_half_norms(model: nn.Module) -> None:
    """Have torch's own norms in ``model`` return the dtype of their input while input and weight are half precision."""
    for module in model.modules():
        if type(module) in _NORMS:
            module.register_forward_hook(_as_input)


def _as_input(norm: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
    if not args or output.dtype is not torch.float32 or args[0].dtype not in HALF_DTYPES:
        return output
    weight = norm.weight
    return output if weight is None or weight.dtype != args[0].dtype else output.to(args[0].dtype)


def take_float32_on_cpu(model: nn.Module) -> None:
    """Have norms and LSTMs in ``model`` take float32 inputs beside half-precision weights, as on CUDA, in place."""
    for module in model.modules():
        if type(module) in _REFUSING and "forward" not in vars(module):
            module.forward = partial(_as_on_cuda, module)


def _as_on_cuda(module: Any, *args: Any, **kwargs: Any) -> Any:
    weight, x = next(module.parameters(recurse=False), None), args[0] if args else kwargs.get("input")
    if weight is None or weight.dtype not in HALF_DTYPES or x is None or x.data.dtype is not torch.float32:
        return type(module).forward(module, *args, **kwargs)
    if isinstance(module, nn.LSTM):  # x may be a PackedSequence
        state = tree_map_only(Tensor, lambda t: t.to(weight.dtype), args[1] if args[1:] else kwargs.get("hx"))
        return nn.LSTM.forward(module, x.to(weight.dtype), state)
    bias = None if module.bias is None else module.bias.float()
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, weight.float(), bias, module.eps)
    return F.group_norm(x, module.num_groups, weight.float(), bias, module.eps)
