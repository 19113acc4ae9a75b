"""One step of many scaled parameters at once: decode into flat float32 memory, update, encode with fresh amax.

Every line below is one or two kernels however many parameters there are. The operations are single additions, products,
quotients and roots, which IEEE 754 defines to the last bit: the same on a flat buffer as on each tensor alone. The flat
memory is taken for the step and given back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor

from lightning_lowprec.formats import E4M3, FP16, Format
from lightning_lowprec.optim import rounding
from lightning_lowprec.optim.flat import FlatBuffer
from lightning_lowprec.optim.scaled_weight import ScaledWeight
from lightning_lowprec.scaling import power_of_two_scale, saturating_cast

State = Mapping[str, Any]
Rule = Callable[[Mapping[str, Tensor]], None]
"""What an optimizer does, in place, with flat float32 tensors: "grad" (free to be overwritten), moments, "weight"."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Where the random bits of a step's stochastic rounding come from."""

    seed: int
    step: int
    start: int
    """Position of the first element in the numbering of all elements that share the seed."""


@final
class Shelf:
    """Parameters of codes, of one device and level, that step together.

    Args:
        params: at least one.
        moments: of the optimizer, and the formats of those that have a scale.
    """

    def __init__(self, params: Sequence[Tensor], moments: Mapping[str, Format]) -> None:
        self.params = list(params)
        self._moments = moments
        self._full = {name: FlatBuffer(self.params, torch.float32) for name in ("grad", *moments, "weight")}
        self._codes = {f.dtype: FlatBuffer(self.params, f.dtype) for f in (E4M3, FP16)}
        views, total = self._full["grad"].views, self._full["grad"].flat.numel()
        starts = [view.storage_offset() for view in views]
        counts = [end - start for start, end in zip(starts, [*starts[1:], total], strict=True)]
        self._counts = torch.tensor(counts, device=views[0].device)
        self._total = total
        self._free()

    @torch.no_grad()
    def update(
        self, scaled: Sequence[ScaledWeight], states: Sequence[State], rule: Rule, rounded: Rounding | None
    ) -> None:
        """``rule`` in float32; all codes are written anew, float16 masters with ``rounded`` or to nearest."""
        for buffer in (*self._full.values(), *self._codes.values()):
            buffer.allocate()
        self._read_gradients(scaled)
        for key in self._moments:
            self._read(key, [s[key] for s in states], _column(states, f"{key}_scale"))
        masters = [p if s.master is None else s.master for p, s in zip(self.params, scaled, strict=True)]
        scales = [s.scale if s.master_scale is None else s.master_scale for s in scaled]
        self._read("weight", masters, scales)
        rule({name: buffer.flat for name, buffer in self._full.items()})
        for key, format in self._moments.items():
            self._write(key, [s[key] for s in states], _column(states, f"{key}_scale"), format)
        self._write("weight", masters, scales, FP16, rounded)
        if scaled[0].master is not None:  # the weight is the master as it was rounded
            self._read("weight", masters, scales)
            self._write("weight", self.params, [s.scale for s in scaled], E4M3)
        self._free()

    def _read_gradients(self, scaled: Sequence[ScaledWeight]) -> None:
        if scaled[0].grad is None:
            torch._foreach_copy_(self._full["grad"].views, [cast(Tensor, p.grad) for p in self.params])
            return
        inv_scales = torch.stack([cast(Tensor, s.grad_inv_scale) for s in scaled])
        self._decode("grad", [cast(Tensor, s.grad) for s in scaled], inv_scales)

    def _read(self, name: str, codes: Sequence[Tensor], scales: Sequence[Tensor] | None) -> None:
        if scales is None:
            torch._foreach_copy_(self._full[name].views, list(codes))
        else:
            self._decode(name, codes, torch.stack(list(scales)).reciprocal_())

    def _decode(self, name: str, codes: Sequence[Tensor], inv_scales: Tensor) -> None:
        buffer = self._codes[codes[0].dtype]
        torch._foreach_copy_(buffer.views, list(codes))
        torch.mul(buffer.flat.float(), self._per_element(inv_scales), out=self._full[name].flat)

    def _write(
        self,
        name: str,
        codes: Sequence[Tensor],
        scales: Sequence[Tensor] | None,
        format: Format,
        rounded: Rounding | None = None,
    ) -> None:
        full, buffer = self._full[name], self._codes[format.dtype]
        if scales is None:
            torch._foreach_copy_(list(codes), full.views)
            return
        amaxes = torch.stack(torch._foreach_norm(full.views, float("inf")))
        fresh = power_of_two_scale(amaxes, format, torch.stack(list(scales)))
        full.flat.mul_(self._per_element(fresh))
        if rounded is not None:
            rounding.stochastic_round_fp16_(full.flat, seed=rounded.seed, step=rounded.step, start=rounded.start)
        buffer.flat.copy_(saturating_cast(full.flat, format))
        torch._foreach_copy_(list(codes), buffer.views)
        torch._foreach_copy_(list(scales), list(fresh.unbind()))

    def _per_element(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self._counts, output_size=self._total)

    def _free(self) -> None:
        for buffer in (*self._full.values(), *self._codes.values()):
            buffer.free()


def _column(states: Sequence[State], key: str) -> list[Tensor] | None:
    return [s[key] for s in states] if key in states[0] else None
