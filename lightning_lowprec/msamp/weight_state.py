"""The codes of one weight and their power-of-two scale (MS-AMP's O1, O2, O3).

| level | value of the weight | what the products multiply by |
|---|---|---|
| O1, O2 | float16 codes / scale | the value, rounded to e4m3 in each forward |
| O3 | float16 codes / scale, MS-AMP's master | e4m3 codes of the value, kept between steps; FSDP2 gathers them |

All tensors are changed in place, so that every alias of a weight sees a write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowprec.numerics import formats
from lightning_lowprec.numerics.rounding import upper_half
from lightning_lowprec.private.torch import increment_versions

Level = Literal["O1", "O2", "O3"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)


@dataclass(eq=False)
class MsampWeightState:
    """The tensors of one weight of codes, or of a part of one weight."""

    codes: Tensor
    """(...) float16; of a weight that FSDP2 has gathered float8_e4m3fn."""
    scale: Tensor
    """Scalar float32; the same object for all parts of a weight."""
    e4m3: Tensor | None = None
    """(...) float8_e4m3fn: at O3, the codes for products."""
    e4m3_scale: Tensor | None = None
    """Scalar float32, for ``e4m3``."""
    pending: Tensor | None = None
    """Values of a master of any precision, (...) float32, that was loaded before its weight."""
    shards: dist.ProcessGroup | None = None
    """The ranks that have a shard of the weight each, and the scales of the whole; None: the weight is whole."""
    whole: MsampWeightState | None = None
    """For a view: the weight that the view is a part of. A write to the view scales the whole weight anew."""
    loading: bool = False
    """A state dict is being loaded, whose values may round to the present ones."""
    cutting: bool = False
    """FSDP2 cuts the weight at the moment: a part becomes a weight that has no whole."""

    @classmethod
    def of(cls, values: Tensor, level: Level, shards: dist.ProcessGroup | None = None) -> MsampWeightState:
        """Encode values, (...) float32; of a sharded weight a collective."""
        codes, scale = encode(values, formats.FP16, shards)
        return cls(codes, scale, *(encode(codes.float() / scale, formats.E4M3, shards) if level == "O3" else ()))

    def part(self, codes: Tensor, e4m3: Tensor | None) -> MsampWeightState:
        """Return the state of a view of the codes."""
        whole = None if self.cutting else self.whole or self
        return replace(self, codes=codes, e4m3=e4m3, pending=None, whole=whole)

    def copied(self, device: torch.device | None = None) -> MsampWeightState:
        """Return a copy in memory of its own, on ``device``, or on the same one."""
        tensors: dict[str, Any] = {
            name: t.to(device or t.device, copy=True) for name, t in vars(self).items() if isinstance(t, Tensor)
        }
        return replace(self, whole=None, **tensors)

    def may_replace(self, other: MsampWeightState) -> bool:
        """Return whether a weight that has the state ``other`` may get this one: whole, of one level and layout."""
        alike = self.codes.dtype == other.codes.dtype and (self.e4m3 is None) == (other.e4m3 is None)
        alike = alike and self.codes.stride() == other.codes.stride()
        return alike and self.whole is None and self.shards is other.shards

    def values(self) -> Tensor:
        """Return the exact values: (...) float32."""
        return self.codes.float() / self.scale

    def for_products(self) -> tuple[Tensor, Tensor]:
        """Return the codes that a product starts from, float16 or float8_e4m3fn, and their scale."""
        if self.e4m3 is None or self.e4m3_scale is None:
            return self.codes, self.scale
        return self.e4m3, self.e4m3_scale

    def set_values_(self, values: Tensor, *, refuse_loss: bool = False) -> None:
        """Encode other values of this rank, (...) float32, in place; of a sharded weight a collective.

        ``refuse_loss``: raise on every rank, and change nothing, if more than half of the changed values would be
        rounded back, as small updates and running averages are. Loading a state dict never raises.
        """
        new = self._encoded(values)
        if self.pending is not None and self._is_rounding(new, self.pending):
            new = self._encoded(self.pending)
        if refuse_loss and not self.loading:
            self._refuse_loss(values, new)
        self.copy_(new)
        self.pending = None

    def encodes(self, values: Tensor) -> bool:
        """Return whether the codes are those of ``values``, (...) float32, which were never written over."""
        return torch.equal(self._encoded(values).values(), self.values())

    def set_master_(self, values: Tensor) -> None:
        """Take a master, (...) float32, if the weight is a rounding of it; else keep it until such values come.

        (An optimizer may be loaded before its model.) Of a sharded weight a collective.
        """
        if self._is_rounding(self, values):
            self.copy_(self._encoded(values))
        else:
            self.pending = values

    def copy_(self, other: MsampWeightState) -> None:
        """Copy codes and scales from a state of the same shape and level."""
        for name in ("codes", "scale", "e4m3", "e4m3_scale"):
            target = getattr(self, name)
            if target is not None:
                target.copy_(getattr(other, name))
                increment_versions([target])  # torch does not, inside of an operation of a tensor class

    def _encoded(self, values: Tensor) -> MsampWeightState:
        return MsampWeightState.of(values, "O2" if self.e4m3 is None else "O3", self.shards)

    def _is_rounding(self, state: MsampWeightState, values: Tensor) -> bool:
        """Return whether ``state`` holds ``values``, or their rounding to e4m3 or half precision, as programs save."""
        codes, scale = encode(self._encoded(values).values(), formats.E4M3, self.shards)
        roundings = (values, codes.float() / scale, upper_half(values), *map(values.to, formats.HALF_DTYPES))
        return any(self._are_equal(self._encoded(rounded.float()), state) for rounded in roundings)

    def _are_equal(self, state: MsampWeightState, other: MsampWeightState) -> bool:
        """Return whether two states of this weight have the same values on every rank."""
        equal = torch.equal(state.values(), other.values())
        return not bool(maximum(torch.tensor(float(not equal), device=self.scale.device), self.shards))

    def _refuse_loss(self, values: Tensor, new: MsampWeightState) -> None:
        """Raise if ``new``, the state of ``values``, has the present values where most of the values differ."""
        present = self.values()
        changed = values != present
        lost = changed & (new.values() == present)
        too_many = (2 * lost.sum() > changed.sum()).float()
        if not bool(maximum(too_many, self.shards)):
            return
        raise RuntimeError(
            f"a write to a weight of shape {tuple(values.shape)} that is kept as codes with a scale (MS-AMP) would be"
            f" lost: {int(lost.sum())} of the {int(changed.sum())} values that it changes are rounded back to"
            f" {self.codes.dtype}. Train the weight with AdamW under a precision of MS-AMP ('msamp-o2'). To"
            " average models, average their state dicts. To merge an adapter, load the state dicts into a plain model."
            " Or keep the layer in high precision: `MSAMP(..., keep=[...])`. To round nevertheless, call"
            " `lightning_lowprec.msamp.set_values_(weight, values)`. If the codes are of an earlier run, and this run"
            " has another precision, give the model float32 weights back before:"
            " `lightning_lowprec.plain(model)`."
        )


def msamp_state_of(param: object) -> MsampWeightState | None:
    """Return the state of a parameter of codes; None for any other tensor."""
    state: MsampWeightState | None = getattr(param, "msamp_state", None)
    return state


def required_state_of(param: Any) -> MsampWeightState:
    """Return the state of a parameter of codes; raise TypeError if another tensor took its place."""
    state: MsampWeightState | None = getattr(param, "msamp_state", None)
    if state is None:
        raise TypeError(
            f"the weight of a ScaledLinear (MS-AMP) is a plain {tuple(param.shape)} tensor of {param.dtype}; expected"
            " its parameter of codes. Parametrize, prune or normalize weights before the conversion, which then leaves"
            " the layer unconverted; give `torch.func.functional_call` the parameters, not a state dict."
        )
    return state


def maximum(values: Tensor, shards: dist.ProcessGroup | None) -> Tensor:
    """Return the maximum over the ranks: (...) float32; a collective. NaN becomes inf, which a maximum keeps."""
    if shards is None:
        return values
    largest = torch.where(values.isnan(), torch.inf, values)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shards)
    return largest


def encode(values: Tensor, format: formats.Format, shards: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """Return codes and their scale: (...) float32 -> (...) of the format, scalar float32; all shards have one scale."""
    scale = formats.power_of_two_scale(maximum(formats.amax(values), shards), format)
    return formats.saturating_cast(values * scale, format), scale
