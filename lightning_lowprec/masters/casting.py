"""Casting a module's parameters to half precision, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

HALF_DTYPES: Final = (torch.float16, torch.bfloat16)
_CASTABLE: Final = (torch.float64, torch.float32, *HALF_DTYPES)  # not FP8: codes have a scale somewhere else


def cast_parameters(
    module: nn.Module,
    dtype: torch.dtype,
    *,
    keep: bool,
    buffer_dtype: torch.dtype | None = None,
    skip: Callable[[str], bool] | None = None,
) -> dict[int, Tensor]:
    """Cast the floating-point parameters of ``module`` in place; the Parameter objects stay, and with them all ties.

    Args:
        module: changed in place: frozen parameters too, and gradients that exist.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        keep: whether to return the float32 originals.
        buffer_dtype: what floating-point buffers are cast to; None leaves them alone (running statistics need
            float32).
        skip: says by fqn which parameters stay as they are; a tied parameter stays if it says so for any of its names.

    Returns:
        The float32 original of every parameter that changed, by ``id(parameter)``, for
        :func:`~lightning_lowprec.masters.optimizer.add_masters`; empty without ``keep``.

    Raises:
        ValueError: ``dtype`` is no half precision.
    """
    if dtype not in HALF_DTYPES:
        raise ValueError(f"`dtype={dtype}` is not valid; expected one of: torch.float16, torch.bfloat16.")
    names = module.named_parameters(remove_duplicate=False)
    skipped = set() if skip is None else {id(p) for name, p in names if skip(name)}
    originals = {}
    for parameter in module.parameters():
        if parameter.dtype in _CASTABLE and parameter.dtype != dtype and id(parameter) not in skipped:
            if keep:
                originals[id(parameter)] = parameter.data.float()
            _cast_parameter(parameter, dtype)
    if any(hasattr(parameter, "to_local") for parameter in module.parameters()):
        module._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # FSDP2 looks at its shards again
    if buffer_dtype is not None:
        for buffer in module.buffers():
            if buffer.dtype in _CASTABLE:
                buffer.data = buffer.data.to(buffer_dtype)
    return originals


def _cast_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    grad, parameter.grad = parameter.grad, None  # torch refuses a gradient of another dtype
    if hasattr(parameter, "to_local"):  # `.data =` would leave a DTensor's shard as it was
        swapped = nn.Parameter(parameter.data.to(dtype), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, swapped)  # type: ignore[no-untyped-call]
    else:
        parameter.data = parameter.data.to(dtype)
    parameter.grad = None if grad is None else grad.to(dtype)
