"""Encode weights as float8 in two layouts, by one kernel on CUDA: e4m3, one scale per weight.

Two layouts, because Hopper's kernels take float8 in one layout only: (N, K) for the forward, (K, N) for the gradient of
the input.

The scale needs the largest absolute value first, for which the whole weight is read. If the optimizer's kernel has
noted this value (:mod:`~lightning_lowprec.numerics.largest`), the weight is encoded by it and measured in the same
pass. A second launch encodes again where the note was wrong, and returns at once elsewhere: the codes are always those
of the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final, Literal, final

import torch
from torch import Tensor

from lightning_lowprec.numerics.from_host import tensor_on
from lightning_lowprec.numerics.triton_runs import is_simulated, kernels_run
from lightning_lowprec.private.torch import copy_all_, increment_versions, largest_absolute_values

DTYPE: Final = torch.float8_e4m3fn
DEVICES = {"cuda"}
_KINDS: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_SIDE: Final = 16  # bytes of alignment, and of what rows and columns are multiples


@final
class Encoded:
    """Memory for the codes of a weight, (N, K)."""

    def __init__(self, weight: Tensor) -> None:
        self.rows = torch.empty_like(weight, dtype=DTYPE, memory_format=torch.contiguous_format)
        """(N, K) float8_e4m3fn, contiguous."""
        self.columns = torch.empty(weight.shape[::-1], dtype=DTYPE, device=weight.device)
        """(K, N) float8_e4m3fn, contiguous: the transpose."""
        self.scale = torch.ones((), device=weight.device)
        """() float32: codes = weight * scale."""


def kernel_encodes(weights: list[Tensor]) -> bool:
    """Return whether the kernel takes these weights, which are of one dtype and on one device."""
    return (
        weights[0].device.type in DEVICES
        and weights[0].dtype in _KINDS
        and all(w.is_contiguous() and w.data_ptr() % _SIDE == 0 for w in weights)
        and all(size % _SIDE == 0 for w in weights for size in w.shape)
        and kernels_run()
    )


def encode(
    weights: list[Tensor],
    targets: Sequence[Encoded],
    scales: Callable[[Tensor], Tensor],
    hints: Tensor | None,
    *,
    kernel: bool,
) -> None:
    """Write codes and scales of ``weights``, which are of one dtype and on one device.

    Args:
        weights: each (N, K).
        targets: where to write.
        scales: returns the scales of largest absolute values: (n,) float -> (n,) float32.
        hints: (len(weights),) float32, what the largest absolute values probably are.
        kernel: whether the kernel runs; :func:`kernel_encodes` must have said that it can.
    """
    if not kernel:
        _write_scales(targets, scales(largest_absolute_values(weights)))
        for weight, target in zip(weights, targets, strict=True):
            _encode_eagerly(weight, target)
        return
    table = _addresses(weights, targets)
    if hints is None:
        _write_scales(targets, scales(largest_absolute_values(weights)))
        launch(weights, table, None, None, "plain")
    else:
        found = torch.zeros(len(weights), device=weights[0].device)
        _write_scales(targets, scales(hints))
        launch(weights, table, hints, found, "check")
        _write_scales(targets, scales(found))
        launch(weights, table, hints, found, "mend")
    increment_versions([t for target in targets for t in (target.rows, target.columns)])


def _write_scales(targets: Sequence[Encoded], scales: Tensor) -> None:
    copy_all_([target.scale for target in targets], list(scales.unbind()))


def _encode_eagerly(weight: Tensor, target: Encoded) -> None:
    limit = torch.finfo(DTYPE).max
    target.rows.copy_((weight.float() * target.scale).clamp(-limit, limit))
    target.columns.copy_(target.rows.t())


def _addresses(weights: Sequence[Tensor], targets: Sequence[Encoded]) -> Tensor:
    """Return the kernel's table: (n, 6) int64."""
    table = [
        number
        for w, t in zip(weights, targets, strict=True)
        for number in (w.data_ptr(), t.rows.data_ptr(), t.columns.data_ptr(), t.scale.data_ptr(), *_in_16(w))
    ]
    return tensor_on(weights[0].device, table, torch.int64)


def launch(
    weights: Sequence[Tensor],
    table: Tensor,
    hints: Tensor | None,
    found: Tensor | None,
    mode: Literal["plain", "check", "mend"],
) -> None:
    """Launch the kernel once; see :func:`~lightning_lowprec.numerics.encode_kernel.encode`."""
    if is_simulated():
        return
    from lightning_lowprec.numerics import encode_kernel

    device = weights[0].device
    tiles = _tiles(tuple(tuple(w.shape) for w in weights), device, encode_kernel.SIDE.value)
    numbers = [None if vector is None else vector.view(torch.int32) for vector in (hints, found)]
    with torch.cuda.device(device) if device.type == "cuda" else torch.device(device):
        encode_kernel.encode[(len(tiles),)](
            tiles, table, *numbers, KIND=_KINDS[weights[0].dtype], MODE=mode,
            num_warps=8,
        )  # fmt: skip


def _in_16(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0] // _SIDE, weight.shape[1] // _SIDE


@functools.lru_cache(maxsize=16)
def _tiles(shapes: tuple[tuple[int, ...], ...], device: torch.device, side: int) -> Tensor:
    """Return weight, tile row and tile column of every tile: (tiles, 3) int32."""
    grids = []
    for number, (rows, columns) in enumerate(shapes):
        tile = torch.cartesian_prod(torch.arange(-(-rows // side)), torch.arange(-(-columns // side)))
        grids.append(torch.cat([torch.full((len(tile), 1), number), tile], dim=1))
    flat = torch.cat(grids).to(torch.int32)
    return tensor_on(device, flat.flatten().tolist(), torch.int32).view(-1, 3)
