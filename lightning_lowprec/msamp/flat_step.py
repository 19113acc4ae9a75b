"""One step of many scaled parameters at once: decode into flat float32 memory, update, encode with fresh amax.

Every line below is one or two kernels however many parameters there are. The operations are single additions, products,
quotients and roots, which IEEE 754 defines to the last bit: the same on a flat buffer as on each tensor alone. The flat
memory is taken for the step and given back.

Compiled, a step has two fused passes over the elements: decode and update, then, with the amaxes known, encode. O3 has
a third, which rounds the float16 master to the e4m3 weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast, final

import torch
from torch import Tensor

from lightning_lowprec.msamp.weight import MsampWeightState, Shards, codes_of
from lightning_lowprec.numerics import rounding
from lightning_lowprec.numerics.flat import FlatBuffer, local
from lightning_lowprec.numerics.formats import E4M3, FP16, Format
from lightning_lowprec.numerics.scaling import power_of_two_scale, saturating_cast

_BACKEND: Final = "inductor"
State = Mapping[str, Any]
Flats = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What an optimizer does, in place, to flat float32 tensors: "grad" (may be overwritten), its moments, "weight"."""

    function: Callable[[Flats, Mapping[str, Any]], None]
    """Of those tensors and the numbers; takes floats for scalars, or (compiled) scalar float32 tensors."""
    numbers: Mapping[str, float | bool]
    """Bools choose the code that is compiled."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Where the random bits of a step's stochastic rounding come from."""

    seed: int
    step: int
    start: int
    """Position of the first element in the numbering of all elements that share the seed."""


@final
class FlatStep:
    """Parameters of codes, of one device and level, that step together.

    Args:
        params: at least one.
        moments: of the optimizer, with their formats; None: kept in float32, without a scale.
        compile: run the two passes through ``torch.compile``.
        shards: if the parameters are sharded; what is here steps here, with scales that all ranks agree on.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        moments: Mapping[str, Format | None],
        compile: bool = False,
        shards: Shards | None = None,
    ) -> None:
        self._owners = list(params)
        self.params = [codes_of(p) for p in params]
        self._moments, self._compile, self._shards = moments, compile, shards
        formats = {"grad": E4M3, **moments, "weight": FP16}
        self._formats = {name: format for name, format in formats.items() if format is not None}
        self._full = {name: FlatBuffer(self.params, torch.float32) for name in formats}
        self._codes = {name: FlatBuffer(self.params, format.dtype) for name, format in self._formats.items()}
        views, total = self._full["grad"].views, self._full["grad"].flat.numel()
        starts = [view.storage_offset() for view in views]
        ends = [*starts[1:], total]
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        self._runs = torch.tensor([counts, ends], device=views[0].device)
        self._free()

    @torch.no_grad()
    def update(
        self, scaled: Sequence[MsampWeightState], states: Sequence[State], rule: Rule, rounded: Rounding | None
    ) -> None:
        """``rule`` in float32; all codes are written anew, float16 masters with ``rounded`` or to nearest."""
        for buffer in (*self._full.values(), *self._codes.values()):
            buffer.allocate()
        masters = [p if s.master is None else s.master for p, s in zip(self.params, scaled, strict=True)]
        stored = {key: [s[key] for s in states] for key in self._moments} | {"weight": masters}
        scales = {key: [s[f"{key}_scale"] for s in states] for key in self._moments if key in self._codes}
        scales["weight"] = [s.scale if s.master_scale is None else s.master_scale for s in scaled]
        self._read(scaled, stored, scales, rule)
        fresh, largest = self._fresh_scales(scales)
        if rounded is not None:
            self._round(fresh["weight"], rounded)
        copy_scale = None if scaled[0].master is None else self._copy_scale(scaled, fresh["weight"], largest, rounded)
        full, codes = _flat(self._full), _flat(self._codes)
        self._pass(_encode)(full, codes, fresh, self._runs)
        if copy_scale is not None:  # a pass of its own: a compiler leaves out the rounding between two casts in one
            self._pass(_copy)(full["weight"], codes["weight"], codes["grad"], fresh["weight"], copy_scale, self._runs)
        for name, tensors in stored.items():
            torch._foreach_copy_(tensors, (self._codes if name in scales else self._full)[name].views)
        for name, olds in scales.items():
            torch._foreach_copy_(olds, list(fresh[name].unbind()))
        if copy_scale is not None:
            torch._foreach_copy_(self.params, self._codes["grad"].views)
            torch._foreach_copy_([s.scale for s in scaled], list(copy_scale.unbind()))
        for of_one in scaled:
            of_one.note_write()
        self._free()

    def _read(
        self,
        scaled: Sequence[MsampWeightState],
        stored: Mapping[str, list[Tensor]],
        scales: Mapping[str, list[Tensor]],
        rule: Rule,
    ) -> None:
        """Fill the flat float32 memory and let the rule change it."""
        inv_scales = {name: torch.stack(of_one).reciprocal_() for name, of_one in scales.items()}
        if scaled[0].grad is None:
            gradients = [local(cast(Tensor, p.grad)) for p in self._owners]
        else:
            gradients = [cast(Tensor, s.grad) for s in scaled]
            inv_scales["grad"] = torch.stack([cast(Tensor, s.grad_inv_scale) for s in scaled])
        for name, tensors in {**stored, "grad": gradients}.items():
            torch._foreach_copy_((self._codes if name in inv_scales else self._full)[name].views, tensors)
        numbers: Mapping[str, Any] = rule.numbers
        if self._compile:  # as tensors, so that another learning rate is no other graph
            floats = {key: float(value) for key, value in numbers.items() if not isinstance(value, bool)}
            scalars = torch.tensor(list(floats.values()), dtype=torch.float32, device=self._runs.device).unbind()
            numbers = {**numbers, **dict(zip(floats, scalars, strict=True))}
        self._pass(_update)(_flat(self._full), _flat(self._codes), inv_scales, self._runs, rule.function, numbers)

    def _amaxes(self, names: Sequence[str]) -> Tensor:
        """(names, parameters) float32; of shards over all ranks, by one reduction."""
        views = [view for name in names for view in self._full[name].views]
        amaxes = torch.stack(torch._foreach_norm(views, float("inf"))).view(len(names), -1)
        return amaxes if self._shards is None else self._shards.maximum(amaxes)

    def _fresh_scales(self, scales: Mapping[str, list[Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
        """By name; and the amaxes of the weights."""
        amaxes = dict(zip(scales, self._amaxes(list(scales)), strict=True))
        fresh = {
            name: power_of_two_scale(amaxes[name], self._formats[name], torch.stack(old))
            for name, old in scales.items()
        }
        return fresh, amaxes["weight"]

    def _round(self, scales: Tensor, rounded: Rounding) -> None:
        weight = self._full["weight"].flat
        scale = _spread(self._runs, len(weight))(scales)
        weight.mul_(scale)
        rounding.stochastic_round_fp16_(weight, seed=rounded.seed, step=rounded.step, start=rounded.start)
        weight.div_(scale)

    def _copy_scale(
        self, scaled: Sequence[MsampWeightState], scales: Tensor, largest: Tensor, rounded: Rounding | None
    ) -> Tensor:
        """The scale of the e4m3 weight, which is the master as it is rounded."""
        if rounded is None:  # rounding keeps the order, so the largest becomes the largest
            amaxes = saturating_cast(largest * scales, FP16).float() / scales
        else:
            (amaxes,) = self._amaxes(["weight"])
        return power_of_two_scale(amaxes, E4M3, torch.stack([s.scale for s in scaled]))

    def _pass(self, function: Callable[..., None]) -> Callable[..., None]:
        return _compiled(function, _BACKEND) if self._compile else function

    def _free(self) -> None:
        for buffer in (*self._full.values(), *self._codes.values()):
            buffer.free()


def _update(
    full: Flats, codes: Flats, inv_scales: Flats, runs: Tensor, rule: Callable[..., None], numbers: Mapping[str, Any]
) -> None:
    """First pass: codes -> float32, which the rule then changes."""
    spread = _spread(runs, len(full["weight"]))
    for name, inv_scale in inv_scales.items():
        torch.mul(codes[name].float(), spread(inv_scale), out=full[name])
    rule(full, numbers)


def _encode(full: Flats, codes: Flats, scales: Flats, runs: Tensor) -> None:
    """Second pass: float32 -> codes."""
    spread = _spread(runs, len(full["weight"]))
    for name, scale in scales.items():
        format = FP16 if codes[name].dtype == FP16.dtype else E4M3
        full[name].mul_(spread(scale))
        codes[name].copy_(saturating_cast(full[name], format))


def _copy(weight: Tensor, master: Tensor, copy: Tensor, scale: Tensor, copy_scale: Tensor, runs: Tensor) -> None:
    """O3: e4m3 codes of float16 ones; ``weight`` is the float32 memory for it."""
    spread = _spread(runs, len(weight))
    torch.div(master.float(), spread(scale), out=weight)
    copy.copy_(saturating_cast(weight.mul_(spread(copy_scale)), E4M3))


def _spread(runs: Tensor, total: int) -> Callable[[Tensor], Tensor]:
    """What makes (total,) of a value per parameter, (parameters,), by their sizes and ends: (2, parameters)."""
    if torch.compiler.is_compiling():
        index = torch.bucketize(torch.arange(total, device=runs.device), runs[1], right=True)
        return lambda values: values[index]  # read in the fused kernel
    return lambda values: values.repeat_interleave(runs[0], output_size=total)


@functools.cache
def _compiled(function: Callable[..., None], backend: str) -> Callable[..., None]:
    return torch.compile(function, backend=backend, fullgraph=True)


def _flat(buffers: Mapping[str, FlatBuffer]) -> dict[str, Tensor]:
    return {name: buffer.flat for name, buffer in buffers.items()}
