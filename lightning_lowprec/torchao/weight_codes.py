"""FP8 codes of weights, computed once per optimizer step, and kept for every micro-batch, forward and backward.

The codes are those that torchao computes at every GEMM: e4m3, one scale per tensor. They are kept in two layouts, see
`numerics/encode.py`: 2 bytes per parameter.

The first layer of a model that meets a changed weight has all changed weights of the model encoded.
`conversion/steps.py` says what counts as changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torchao.float8.float8_utils import amax_to_scale

from lightning_lowprec.conversion.steps import seen, watch
from lightning_lowprec.numerics.encode import DTYPE, Encoded, encode, kernel_encodes
from lightning_lowprec.numerics.largest import largest
from lightning_lowprec.private.torch import local_tensor


@final
class WeightCodes:
    """The codes of one weight, a matrix or a stack of them, which a layer keeps; no part of its state."""

    def __init__(self, model: ModelCodes, layer: nn.Module, name: str, merged: Sequence[str] = ()) -> None:
        self.model = model
        self._merged = merged  # the adapters that are in the weight; PEFT changes this list
        self._parameter: Tensor = getattr(layer, name)
        self.weight = local_tensor(self._parameter)
        """The Parameter; of a DTensor, the part that this rank has."""
        self._layer, self._name = weakref.ref(layer), name
        self.checked_outside = False
        """Whether compiled code may use the codes without a check, because each call of it is preceded by one."""
        self.is_read = True
        """Whether a product reads the codes; a layer whose products run in high precision needs none."""
        self.made: Encoded
        self._seen: tuple[int | str, ...] | None = None

    def layer(self) -> nn.Module | None:
        """Return the layer; None if the layer is gone, or has another weight."""
        layer = self._layer()
        return layer if layer is not None and self._is_of(getattr(layer, self._name)) else None

    def _is_of(self, held: Tensor) -> bool:
        self.weight = part = local_tensor(self._parameter)  # `.to()` gives a DTensor another part
        if held is self._parameter:
            return True
        # expert parallelism of transformers puts a view of this rank's part into the layer, for the time of its forward
        return part is not self._parameter and held.data_ptr() == part.data_ptr() and held.shape == part.shape

    def matrix(self) -> Tensor:
        """Return the weight as one matrix, without a graph: (N, K), or (E * N, K) of a stack."""
        return self.weight.detach().flatten(0, -2)

    def is_stale(self, *, training: bool) -> bool:
        """Return whether the weight may have changed since it was encoded."""
        now = seen(self.weight, training=training, steps=self._parameter.requires_grad)
        return self._seen != (*now, *self._merged)

    def forget(self) -> None:
        """Have the next use encode the weight, in the same memory."""
        if self._seen is not None:
            self._seen = ()

    def prepare(self, *, training: bool) -> None:
        """Allocate memory where there is none, and note that the weight is encoded."""
        weight, matrix = self.weight, self.matrix()
        if self._seen is None or self.made.rows.shape != matrix.shape or self.made.rows.device != weight.device:
            self.made = Encoded(matrix)
        now = seen(weight, training=training, steps=self._parameter.requires_grad)
        self._seen = (*now, *self._merged)

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
        power_of_2: whether scales are rounded down to powers of two.
        kernel: whether a kernel may encode on CUDA.
    """

    def __init__(self, *, power_of_2: bool, kernel: bool) -> None:
        self._codes: list[weakref.ref[WeightCodes]] = []
        self._power_of_2, self._kernel = power_of_2, kernel
        watch()

    def add(self, layer: nn.Module, name: str = "weight", merged: Sequence[str] = ()) -> WeightCodes:
        """Return the codes of a weight, for its layer to keep.

        Args:
            layer: has the weight; the sides of its matrices are multiples of 16.
            name: of the Parameter.
            merged: the names of the adapters that were added to the weight; whoever adds one changes this list.
        """
        codes = WeightCodes(self, layer, name, merged)
        self._codes.append(weakref.ref(codes))
        return codes

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def refresh(self) -> None:
        """Encode every weight that may have changed."""
        stale: dict[tuple[torch.device, torch.dtype], list[WeightCodes]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for codes in filter(None, (ref() for ref in self._codes)):
                layer = codes.layer() if codes.is_read else None
                if layer is not None and codes.is_stale(training=layer.training):
                    codes.prepare(training=layer.training)
                    stale.setdefault((codes.weight.device, codes.weight.dtype), []).append(codes)
            for found in stale.values():
                self._encode(found)

    def _encode(self, found: list[WeightCodes]) -> None:
        weights, made = [codes.matrix() for codes in found], [codes.made for codes in found]
        kernel = self._kernel and kernel_encodes(weights)
        hints = largest([codes.weight for codes in found]) if kernel else None
        encode(weights, made, self._scales, hints, kernel=kernel)

    def _scales(self, amax: Tensor) -> Tensor:
        scales: Tensor = amax_to_scale(amax, DTYPE, self._power_of_2)
        return scales
