"""The layer: weight and input are rounded to e4m3 with one scale each; gradients pass through the rounding."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_lowprec.numerics.formats import E4M3, amax, power_of_two_scale, saturating_cast


class Format:
    """How the weight travels under FSDP2: see `WireFormat` in `fsdp2/fp8_gather.py`."""

    dtype = E4M3.dtype
    least_amax = 0.0
    tile = None
    per_step = False
    scales = staticmethod(lambda amax: power_of_two_scale(amax, E4M3))
    whole = staticmethod(lambda codes, scale, dtype: Gathered(codes, scale, dtype))

    def encode(self, values: Tensor, scale: Tensor) -> Tensor:
        return saturating_cast(values.float() * scale, E4M3)

    def refill(self, whole: Tensor, codes: Tensor, scale: Tensor) -> None:
        whole.scale.copy_(scale)


class Gathered(Tensor):
    """Codes that show their values to every operation."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        made = Tensor._make_wrapper_subclass(cls, codes.size(), strides=codes.stride(), dtype=dtype)
        made.codes, made.scale = codes, scale.clone()
        return made

    def values(self) -> Tensor:
        return (self.codes.float() / self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default, torch.ops.aten.view.default):
            return Gathered(args[0].codes, args[0].scale, args[0].dtype)
        return func(*pytree.tree_map_only(Gathered, Gathered.values, args), **(kwargs or {}))


def rounded(x: Tensor) -> Tensor:
    """x to the nearest value of e4m3 with a power-of-two scale; the gradient is that of x."""
    scale = power_of_two_scale(amax(x.detach()), E4M3)
    values = saturating_cast(x.detach().float() * scale, E4M3).float() / scale
    return x + (values.to(x.dtype) - x).detach()


class ToyLinear(nn.Linear):
    wire_format = Format()

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(rounded(input), rounded(self.weight), self.bias)


def convert(model: nn.Module, fqns: tuple[str, ...]) -> None:
    for fqn in fqns:
        model.get_submodule(fqn).__class__ = ToyLinear


def revert(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, ToyLinear):
            module.__class__ = nn.Linear
