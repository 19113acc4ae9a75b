"""Encode a weight as float8 in two layouts, by one kernel on CUDA: e4m3, one scale.

Two layouts, because Hopper's kernels take float8 in one layout only: (N, K) for the forward, (K, N) for the gradient of
the input.

The scale needs the largest absolute value first, for which the whole weight is read. If the optimizer's kernel has
noted this value (:mod:`~lightning_lowprec.numerics.largest`), the weight is encoded by it and measured in the same
pass. A second launch encodes again where the note was wrong, and returns at once elsewhere: the codes are always those
of the weight.

No library writes both layouts in one pass, and none knows the note. The ledger counts 10.9 GB for an FP8 head with
float32 weights, and 12.4 GB with compiled casts in place of this kernel; with bf16 weights 8.77 and 8.81.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import torch
from torch import Tensor

from lightning_lowprec.numerics.triton_runs import is_simulated, kernels_run
from lightning_lowprec.private.torch import largest_absolute_values

DTYPE: Final = torch.float8_e4m3fn
DEVICES = {"cuda"}
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_SIDE: Final = 16  # bytes of alignment, and of what rows and columns are multiples


def kernel_encodes(weight: Tensor) -> bool:
    """Return whether the kernel takes this weight."""
    return (
        weight.device.type in DEVICES
        and weight.dtype in _DTYPES
        and weight.is_contiguous()
        and weight.data_ptr() % _SIDE == 0
        and all(size % _SIDE == 0 for size in weight.shape)
        and kernels_run()
    )


def weight_codes(
    weight: Tensor, scale_of: Callable[[Tensor], Tensor], hint: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of a weight, (N, K), the transposed codes, (K, N), and the scale: codes = weight * scale.

    Args:
        weight: (N, K); :func:`kernel_encodes` must have said that the kernel takes it.
        scale_of: returns the scale of a largest absolute value: () float -> () float32.
        hint: () float32, what the largest absolute value probably is.
    """
    rows, columns = (torch.empty(shape, dtype=DTYPE, device=weight.device) for shape in (weight.shape, weight.T.shape))
    if hint is None:
        scale = scale_of(largest_absolute_values([weight])[0])
        launch(weight, rows, columns, scale, None, None, "plain")
        return rows, columns, scale
    found = torch.zeros((), device=weight.device)
    launch(weight, rows, columns, scale_of(hint), hint, found, "check")
    scale = scale_of(found)
    launch(weight, rows, columns, scale, hint, found, "mend")
    return rows, columns, scale


def launch(
    weight: Tensor,
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    hint: Tensor | None,
    found: Tensor | None,
    mode: Literal["plain", "check", "mend"],
) -> None:
    """Launch the kernel once; see :func:`~lightning_lowprec.numerics.weight_codes_kernel.encode`."""
    if is_simulated():
        return
    from lightning_lowprec.numerics import weight_codes_kernel

    side = weight_codes_kernel.SIDE.value
    grid = tuple(-(-size // side) for size in columns.shape)
    codes = [layout.view(torch.int8) for layout in (rows, columns)]
    numbers = [None if number is None else number.view(torch.int32) for number in (hint, found)]
    with torch.cuda.device(weight.device) if weight.is_cuda else torch.device(weight.device):
        weight_codes_kernel.encode[grid](weight, *codes, scale, *numbers, *weight.shape, MODE=mode, num_warps=8)
