"""How FSDP2 gathers weights for torchao's layers as float8, and the tensor that they get. It imports torchao.

A layer multiplies by the codes, and all other code reads the values. torchao's own tensor knows the operations of its
layers and fails at others, such as a model's ``F.linear(x, layer.weight.t())``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig
from typing_extensions import override

from lightning_lowprec.numerics.formats import encode
from lightning_lowprec.numerics.one_pass import in_one_pass
from lightning_lowprec.numerics.tiles import Tile
from lightning_lowprec.private.torch import MOVING_OPERATIONS, inference_mode_of, tree_map_only
from lightning_lowprec.private.torchao import codes_of, constructor_arguments, set_scale
from lightning_lowprec.products.arithmetic import Coding, Tiled, Transposable
from lightning_lowprec.products.coded_weight import CodedWeight

_aten: Any = torch.ops.aten
_VIEWS: Final = {
    *(_aten.detach.default, _aten.t.default, _aten.transpose.int, _aten.view.default, _aten.as_strided.default),
    *(_aten.slice.Tensor, _aten.split.Tensor),
}
_PRODUCTS: Final = {_aten.mm.default, _aten.addmm.default}
_ALIASES: Final = {_aten.detach.default, _aten.view.default, _aten.as_strided.default}  # of the whole weight
_HALF: Final = (torch.bfloat16, torch.float16)


@final
class GatheredWeight(CodedWeight, Float8TrainingTensor):
    """torchao's float8 tensor, which shows its values to operations that torchao does not run on codes."""

    __slots__ = ()

    @override
    def codes_and_scale(self) -> tuple[Tensor, Tensor]:
        return codes_of(self)

    @override
    def decode(self) -> Tensor:
        return self.to_original_precision()  # type: ignore[no-untyped-call,no-any-return]

    @classmethod
    def on_codes(cls, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep codes for views, casts of autocast and products with codes."""
        casts = func is MOVING_OPERATIONS[0] and kwargs.keys() == {"dtype"} and kwargs["dtype"] in _HALF
        codes_alone = func in _PRODUCTS and all(isinstance(t, Float8TrainingTensor) for t in args[-2:])
        if not (casts or codes_alone or func in _VIEWS):
            values = tree_map_only(Float8TrainingTensor, Float8TrainingTensor.to_original_precision, (args, kwargs))
            return func(*values[0], **values[1])
        by_torchao: Any = super(CodedWeight, cls).__torch_dispatch__
        return tree_map_only(Float8TrainingTensor, cls._of, by_torchao(func, types, args, kwargs))

    @classmethod
    def _of(cls, tensor: Tensor) -> "GatheredWeight":
        codes, *rest = constructor_arguments(tensor)
        with inference_mode_of(codes):
            return cls(codes, *rest)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], metadata: object, size: object, stride: object
    ) -> "GatheredWeight":
        return GatheredWeight._of(Float8TrainingTensor.__tensor_unflatten__(inner, metadata, size, stride))


@final
class GatheredTiles(CodedWeight):
    """Codes and the scales of tiles, which the layer multiplies by; all other code reads the values."""

    codes: Tensor
    scale: Tensor
    by: Tiled

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, by: Tiled, dtype: torch.dtype) -> "GatheredTiles":
        """Make a tensor without memory, and hang codes and scales at it."""
        weight = cls.showing(codes, dtype)
        weight.codes, weight.scale, weight.by = codes, scale, by
        return weight

    @override
    def codes_and_scale(self) -> tuple[Tensor, Tensor]:
        return self.codes, self.scale

    @override
    def decode(self) -> Tensor:
        return self.by.decode(self.codes, self.scale).to(self.dtype)

    @classmethod
    def on_codes(cls, func: object, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep codes for aliases of the whole weight."""
        weight: Any = args[0]
        if func not in _ALIASES or args[1:3] not in ((), ([*weight.shape],), ([*weight.shape], [*weight.stride()])):
            return NotImplemented
        return cls(weight.codes.detach(), weight.scale, weight.by, weight.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scale"], (self.by, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], metadata: tuple[Tiled, torch.dtype], size: object, stride: object
    ) -> "GatheredTiles":
        return GatheredTiles(inner["codes"], inner["scale"], *metadata)


@dataclass(frozen=True)
class TorchAOWire:
    """The arithmetic of the layers, and the tensor that holds a weight's codes."""

    by: Transposable
    coding: Coding
    mm_config: LinearMMConfig | None
    """torchao's settings of the three GEMMs, the same for all layers of a model that are gathered; None with tiles."""
    per_step: bool
    least_amax: ClassVar[float] = 0.0  # `scales` has a bound

    @property
    def tile(self) -> Tile | None:
        """Rows and columns of what has a scale; None: the whole weight."""
        return self.by.tile

    @property
    def dtype(self) -> torch.dtype:
        """The format of codes."""
        return self.coding.dtype

    def scales(self, amax: Tensor) -> Tensor:
        """Return the scales of largest absolute values."""
        return self.coding.scales(amax)

    def encode(self, values: Tensor, scale: Tensor, *, first: int = 0, out: Tensor | None = None) -> Tensor:
        """(...) any float -> (...) codes; inf becomes the largest value."""
        if not isinstance(self.by, Tiled):
            return in_one_pass(encode, values, scale, self.dtype, out=out)
        codes = self.by.encode_rows(values, scale, first)
        return codes if out is None else out.copy_(codes)

    def whole(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gathered weight."""
        if isinstance(self.by, Tiled):
            return GatheredTiles(codes, scale, self.by, dtype)
        whole: Tensor = GatheredWeight(codes, scale, dtype, self.mm_config, gemm_input_role=GemmInputRole.WEIGHT)
        return whole

    def refill(self, whole: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Update the scale; new codes are already in the same memory."""
        if isinstance(whole, GatheredTiles):
            whole.scale = scale
        else:
            set_scale(whole, scale)
