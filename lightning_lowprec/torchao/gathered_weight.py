"""A weight that FSDP2 gathered as float8: an FP8Layer multiplies by the codes, all other code reads the values.

torchao's tensor knows the operations of its own layers and fails at others, such as a model's ``F.linear(x,
layer.weight.t())``. Importing this module imports torchao (about 3 s).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from lightning_lowprec.private.torch import (
    MOVING_OPERATIONS,
    inference_mode_of,
    tree_leaves,
    tree_map_only,
    written_arguments,
)
from lightning_lowprec.private.torchao import codes_of, constructor_arguments
from lightning_lowprec.products.coded_weight import CodedWeight

_aten: Any = torch.ops.aten
_VIEWS: Final = {
    *(_aten.detach.default, _aten.t.default, _aten.transpose.int, _aten.view.default, _aten.as_strided.default),
    *(_aten.slice.Tensor, _aten.split.Tensor),
}
_PRODUCTS: Final = {_aten.mm.default, _aten.addmm.default}
_HALF: Final = (torch.bfloat16, torch.float16)


@final
class GatheredWeight(Float8TrainingTensor, CodedWeight):
    """torchao's float8 tensor, which shows its values to operations that torchao does not run on codes."""

    __slots__ = ()

    def codes_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return the codes, and their scale."""
        return codes_of(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch passes `func` first
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep codes for views, casts of autocast and products with codes; let all else read the values.

        Raises:
            RuntimeError: a write, which would be lost when FSDP2 frees the weight.
        """
        kwargs = kwargs or {}
        if any(isinstance(t, GatheredWeight) for t in tree_leaves(written_arguments(func, args, kwargs))):
            raise RuntimeError(
                f"{func} would write to a gathered weight of shape {tuple(args[0].shape)} (FSDP2), which is freed after"
                " its layer ran. Write to the shards, between steps."
            )
        casts = func is MOVING_OPERATIONS[0] and kwargs.keys() == {"dtype"} and kwargs["dtype"] in _HALF
        codes_alone = func in _PRODUCTS and all(isinstance(t, Float8TrainingTensor) for t in args[-2:])
        if casts or codes_alone or func in _VIEWS:
            codes = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            return tree_map_only(Float8TrainingTensor, cls._of, codes)
        values = tree_map_only(Float8TrainingTensor, Float8TrainingTensor.to_original_precision, (args, kwargs))
        return func(*values[0], **values[1])

    @classmethod
    def _of(cls, tensor: Tensor) -> GatheredWeight:
        codes, *rest = constructor_arguments(tensor)
        with inference_mode_of(codes):
            return cls(codes, *rest)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], metadata: Any, size: Any, stride: Any) -> GatheredWeight:
        """Build the weight again; called by compilers."""
        return GatheredWeight._of(Float8TrainingTensor.__tensor_unflatten__(inner, metadata, size, stride))
