"""Norms with half-precision weights return half precision, so that the residual stream stays half precision.

CUDA's autocast runs torch's LayerNorm, GroupNorm and RMSNorm in float32 and returns float32. Where a block ends with a
norm (BERT), all that follows would be float32: twice the bytes. On CPU autocast returns the input's dtype already.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_lowprec.private.torch_modules import remove_forward_hook

_NORMS: Final = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_HALF: Final = (torch.bfloat16, torch.float16)


def hold(model: nn.Module) -> None:
    """Have torch's own norms in ``model`` return the dtype of their input while input and weight are half precision."""
    release(model)
    for module in model.modules():
        if type(module) in _NORMS:
            module.register_forward_hook(_as_input)


def release(model: nn.Module) -> None:
    """Undo :func:`hold`."""
    for module in model.modules():
        remove_forward_hook(module, _as_input)


def _as_input(norm: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
    if not args or output.dtype is not torch.float32 or args[0].dtype not in _HALF:
        return output
    weight = norm.weight
    return output if weight is None or weight.dtype != args[0].dtype else output.to(args[0].dtype)
