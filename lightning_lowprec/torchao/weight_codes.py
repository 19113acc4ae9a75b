"""FP8 codes of weights, computed once per optimizer step, and kept for every micro-batch, forward and backward.

The codes are those that torchao computes at every GEMM: e4m3, one scale per tensor. They are kept in two layouts,
(N, K) for the forward and (K, N) for the gradient of the input, because Hopper's kernels take float8 in one layout
only: 2 bytes per parameter.

The first layer of a model that meets a changed weight has all changed weights of the model encoded: one pass for the
largest values, one for the codes. `conversion/steps.py` says what counts as changed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torchao.float8.float8_utils import amax_to_scale

from lightning_lowprec.conversion.steps import Seen, seen, watch
from lightning_lowprec.numerics.from_host import tensor_on
from lightning_lowprec.numerics.triton_runs import is_simulated, kernels_run
from lightning_lowprec.private.torch import copy_all_, increment_versions, largest_absolute_values

DTYPE = torch.float8_e4m3fn
_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@final
class WeightCodes:
    """The codes of one weight, (N, K), which a layer keeps; no part of its state."""

    def __init__(self, model: ModelCodes, weight: Tensor) -> None:
        self.model, self.weight = model, weight
        self.checked_outside = False
        """Whether compiled code may use the codes without a check, because each call of it is preceded by one."""
        self.rows: Tensor
        """(N, K) float8_e4m3fn."""
        self.columns: Tensor
        """(K, N) float8_e4m3fn: the transpose."""
        self.scale: Tensor
        """() float32: codes = weight * scale."""
        self._seen: Seen | None = None

    def is_stale(self, *, training: bool) -> bool:
        """Return whether the weight may have changed since it was encoded."""
        return self._seen != seen(self.weight, training=training, steps=self.weight.requires_grad)

    def prepare(self, *, training: bool) -> None:
        """Allocate memory where there is none, and note that the weight is encoded."""
        weight = self.weight
        if self._seen is None or self.rows.shape != weight.shape or self.rows.device != weight.device:
            self.rows = torch.empty_like(weight, dtype=DTYPE, memory_format=torch.contiguous_format)
            self.columns = torch.empty(weight.shape[::-1], dtype=DTYPE, device=weight.device)
            self.scale = torch.ones((), device=weight.device)
        self._seen = seen(weight, training=training, steps=weight.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave the codes out of copies; the plugin gives them to a copy when it is set up."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the codes out of pickles."""
        return type(None), ()


@final
class ModelCodes:
    """The codes of all FP8 layers of a model.

    Args:
        layers: layers with a 2-D ``weight`` whose sides are multiples of 16. Each gets ``weight_codes``.
        power_of_2: whether scales are rounded down to powers of two.
        kernel: whether a kernel may encode on CUDA.
    """

    def __init__(self, layers: Sequence[nn.Module], *, power_of_2: bool, kernel: bool) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]
        self._power_of_2, self._kernel = power_of_2, kernel
        watch()
        for layer in layers:
            layer.weight_codes = WeightCodes(self, layer.weight)  # type: ignore[assignment, arg-type]

    def refresh(self) -> None:
        """Encode every weight that may have changed."""
        self.encode(layer for ref in self._layers if (layer := ref()) is not None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def encode(self, layers: Iterable[nn.Module]) -> None:
        """Encode the weights of ``layers`` that may have changed."""
        stale: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, WeightCodes]]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for layer in layers:
                codes: WeightCodes | None = vars(layer).get("weight_codes")
                if codes is None or codes.weight is not layer.weight:
                    continue
                if codes.is_stale(training=layer.training):
                    codes.prepare(training=layer.training)
                    weight = codes.weight.detach()
                    stale.setdefault((weight.device, weight.dtype), []).append((weight, codes))
            for (device, dtype), found in stale.items():
                self._encode([weight for weight, _ in found], [codes for _, codes in found], device, _KINDS.get(dtype))

    def _encode(self, weights: list[Tensor], codes: list[WeightCodes], device: torch.device, kind: str | None) -> None:
        scales = amax_to_scale(largest_absolute_values(weights), DTYPE, self._power_of_2)
        copy_all_([c.scale for c in codes], list(scales.unbind()))
        aligned = all(w.is_contiguous() and w.data_ptr() % 16 == 0 for w in weights)
        if kind is not None and self._kernel and device.type in DEVICES and aligned and kernels_run():
            launch(weights, codes, kind)
            return
        limit = torch.finfo(DTYPE).max
        for weight, made in zip(weights, codes, strict=True):
            made.rows.copy_((weight.float() * made.scale).clamp(-limit, limit))
            made.columns.copy_(made.rows.t())


DEVICES = {"cuda"}


def launch(weights: Sequence[Tensor], codes: Sequence[WeightCodes], kind: str) -> None:
    """Encode with one launch of the kernel: ``weights`` of one dtype on one device, contiguous and aligned."""
    if is_simulated():
        return
    from lightning_lowprec.numerics import encode_kernel

    device = weights[0].device
    table = [
        number
        for w, c in zip(weights, codes, strict=True)
        for number in (w.data_ptr(), c.rows.data_ptr(), c.columns.data_ptr(), c.scale.data_ptr(), *_in_16(w))
    ]
    tiles = _tiles(tuple(tuple(w.shape) for w in weights), device, encode_kernel.SIDE.value)
    with torch.cuda.device(device) if device.type == "cuda" else torch.device(device):
        encode_kernel.encode[(len(tiles),)](
            tiles, tensor_on(device, table, torch.int64), KIND=kind, num_warps=8
        )  # fmt: skip
    increment_versions([t for c in codes for t in (c.rows, c.columns)])


def _in_16(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0] // 16, weight.shape[1] // 16


@functools.lru_cache(maxsize=16)
def _tiles(shapes: tuple[tuple[int, ...], ...], device: torch.device, side: int) -> Tensor:
    """Return weight, tile row and tile column of every tile: (tiles, 3) int32."""
    grids = []
    for number, (rows, columns) in enumerate(shapes):
        tile = torch.cartesian_prod(torch.arange(-(-rows // side)), torch.arange(-(-columns // side)))
        grids.append(torch.cat([torch.full((len(tile), 1), number), tile], dim=1))
    flat = torch.cat(grids).to(torch.int32)
    return tensor_on(device, flat.flatten().tolist(), torch.int32).view(-1, 3)
