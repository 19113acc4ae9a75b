"""FP8 codes of weights, computed once per optimizer step, and kept for every micro-batch, forward and backward.

The codes are those that torchao computes at every GEMM: e4m3, one scale per tensor. They are kept in two layouts, see
`numerics/encode.py`: 2 bytes per parameter.

The first layer of a model that meets a changed weight has all changed weights of the model encoded.
`conversion/steps.py` says what counts as changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torchao.float8.float8_utils import amax_to_scale

from lightning_lowprec.conversion.steps import Seen, seen, watch
from lightning_lowprec.numerics.encode import DTYPE, Encoded, encode, kernel_encodes
from lightning_lowprec.numerics.largest import largest


@final
class WeightCodes:
    """The codes of one weight, (N, K), which a layer keeps; no part of its state."""

    def __init__(self, model: ModelCodes, weight: Tensor) -> None:
        self.model, self.weight = model, weight
        self.checked_outside = False
        """Whether compiled code may use the codes without a check, because each call of it is preceded by one."""
        self.is_read = True
        """Whether a product reads the codes; a layer whose products run in high precision needs none."""
        self.made: Encoded
        self._seen: Seen | None = None

    def is_stale(self, *, training: bool) -> bool:
        """Return whether the weight may have changed since it was encoded."""
        return self._seen != seen(self.weight, training=training, steps=self.weight.requires_grad)

    def prepare(self, *, training: bool) -> None:
        """Allocate memory where there is none, and note that the weight is encoded."""
        weight = self.weight
        if self._seen is None or self.made.rows.shape != weight.shape or self.made.rows.device != weight.device:
            self.made = Encoded(weight)
        self._seen = seen(weight, training=training, steps=weight.requires_grad)

    def free(self) -> None:
        """Free the memory of the codes; the next use encodes the weight."""
        self._seen = None
        vars(self).pop("made", None)

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
                if codes is None or not codes.is_read or codes.weight is not layer.weight:
                    continue
                if codes.is_stale(training=layer.training):
                    codes.prepare(training=layer.training)
                    key = codes.weight.device, codes.weight.dtype
                    stale.setdefault(key, []).append((codes.weight, codes))
            for found in stale.values():
                self._encode(found)

    def _encode(self, found: list[tuple[Tensor, WeightCodes]]) -> None:
        weights, codes = [weight.detach() for weight, _ in found], [codes.made for _, codes in found]
        kernel = self._kernel and kernel_encodes(weights)
        hints = largest([weight for weight, _ in found]) if kernel else None
        encode(weights, codes, self._scales, hints, kernel=kernel)

    def _scales(self, amax: Tensor) -> Tensor:
        scales: Tensor = amax_to_scale(amax, DTYPE, self._power_of_2)
        return scales
