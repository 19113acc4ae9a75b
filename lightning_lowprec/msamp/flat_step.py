"""One step of many parameters of codes: decode into flat float32 memory, update, encode with fresh amaxes.

Every operation below is one or two kernels, however many parameters there are. The operations are single additions,
products, quotients and roots, which IEEE 754 defines to the last bit: a flat buffer gives the same bits as each tensor
alone. The flat memory is allocated for the step and freed after it. A step that is compiled needs no such memory:
:class:`~lightning_lowprec.msamp.fused_step.FusedStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor

from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.weight import record_writes, required_state_of
from lightning_lowprec.msamp.weight_state import MsampWeightState
from lightning_lowprec.numerics.flat import FlatBuffer, local
from lightning_lowprec.numerics.formats import E4M3, FP16, Format
from lightning_lowprec.numerics.from_host import tensor_on
from lightning_lowprec.numerics.scaling import power_of_two_scale, saturating_cast
from lightning_lowprec.private.torch import copy_all_, largest_absolute_values

Flats = Mapping[str, Tensor]
Rule = Callable[[Flats, Mapping[str, Any]], None]
"""The update of an optimizer, in place, of flat (N,) float32 tensors: "grad" (may be overwritten), moments, "weight".

Numbers are floats, or in a compiled step scalar float32 tensors. Bools choose the code that is compiled."""


@final
class FlatStep:
    """Parameters of codes, of one device and level, that step together.

    Args:
        params: at least one; sharded parameters step their shards, with scales that all ranks agree on.
        moments: the moments of the optimizer with their formats; None: in float32, without a scale.
        rule: the update.
    """

    def __init__(self, params: Sequence[Tensor], moments: Mapping[str, Format | None], rule: Rule) -> None:
        self._params = list(params)
        weights = [required_state_of(p) for p in params]
        self._shards = weights[0].shards
        self._moments = moments
        self._rule = rule
        formats = {"grad": E4M3, **moments, "weight": FP16}
        self._formats = {name: format for name, format in formats.items() if format is not None}
        like = [weight.codes for weight in weights]
        self._full = {name: FlatBuffer(like, torch.float32) for name in formats}
        self._codes = {name: FlatBuffer(like, format.dtype) for name, format in self._formats.items()}
        memory = self._full["grad"]
        ends = [*(int(view.storage_offset()) for view in memory.views[1:]), memory.flat.numel()]
        last = tensor_on(memory.flat.device, ends, torch.int64)
        self._runs = last.diff(prepend=last.new_zeros(1))
        self._buffers = [*self._full.values(), *self._codes.values()]
        for buffer in self._buffers:
            buffer.free()

    @torch.no_grad()
    def update(
        self,
        states: Sequence[Mapping[str, Any]],
        numbers: Mapping[str, float | bool],
        rounding: Callable[[Tensor], Any] | None,
    ) -> None:
        """Apply the rule in float32 and write all codes anew.

        Args:
            states: the optimizer's state of every parameter.
            numbers: for the rule.
            rounding: rounds flat float16 weights (at O3: masters), as float32 numbers, stochastically in place; None:
                to nearest.
        """
        for buffer in self._buffers:
            buffer.allocate()
        weights = [required_state_of(p) for p in self._params]
        has_master = weights[0].master is not None
        stepped = [weight.stepped() for weight in weights]
        stored = {key: [s[key] for s in states] for key in self._moments}
        scales = {key: [s[f"{key}_scale"] for s in states] for key in self._moments if key in self._codes}
        stored["weight"] = [codes for codes, _ in stepped]
        scales["weight"] = [scale for _, scale in stepped]
        self._decode_and_update(stored, scales, numbers)
        amaxes = dict(zip(scales, self._amaxes(list(scales)), strict=True))
        fresh = {
            name: power_of_two_scale(amaxes[name], self._formats[name], torch.stack(old))
            for name, old in scales.items()
        }
        if rounding is not None:
            self._round(fresh["weight"], rounding)
            if has_master:
                (amaxes["weight"],) = self._amaxes(["weight"])
        _encode(_flat(self._full), _flat(self._codes), fresh, self._runs)
        for name, tensors in stored.items():
            copy_all_(tensors, (self._codes if name in scales else self._full)[name].views)
        for name, olds in scales.items():
            copy_all_(olds, list(fresh[name].unbind()))
        if has_master:
            self._write_e4m3(weights, fresh["weight"], amaxes["weight"])
        record_writes(self._params)
        for buffer in self._buffers:
            buffer.free()

    def _decode_and_update(
        self,
        stored: Mapping[str, list[Tensor]],
        scales: Mapping[str, list[Tensor]],
        numbers: Mapping[str, float | bool],
    ) -> None:
        """Fill the flat float32 memory and apply the rule."""
        inv_scales = {name: torch.stack(of_one).reciprocal_() for name, of_one in scales.items()}
        scaled = [p.grad for p in self._params if isinstance(p.grad, ScaledGradient)]  # all or none
        if scaled:
            gradients = [gradient.codes for gradient in scaled]
            inv_scales["grad"] = torch.stack([gradient.inv_scale for gradient in scaled])
        else:
            gradients = [local(cast(Tensor, p.grad)) for p in self._params]
        for name, tensors in {**stored, "grad": gradients}.items():
            copy_all_((self._codes if name in inv_scales else self._full)[name].views, tensors)
        _update(_flat(self._full), _flat(self._codes), inv_scales, self._runs, self._rule, numbers)

    def _amaxes(self, names: Sequence[str]) -> Tensor:
        """Return (names, parameters) float32; for shards the maximum over all ranks, by one reduction."""
        views = [view for name in names for view in self._full[name].views]
        amaxes = largest_absolute_values(views).view(len(names), -1)
        return amaxes if self._shards is None else self._shards.maximum(amaxes)

    def _round(self, scales: Tensor, rounding: Callable[[Tensor], Any]) -> None:
        """Round the flat weights to values that float16 codes with ``scales`` have."""
        weight = self._full["weight"].flat
        scale = _expander(self._runs, len(weight))(scales)
        rounding(weight.mul_(scale))
        weight.div_(scale)

    def _write_e4m3(self, weights: list[MsampWeightState], master_scales: Tensor, amaxes: Tensor) -> None:
        """Round the masters to the e4m3 weights. ``amaxes`` are those of the masters, before or after rounding."""
        # rounding to nearest keeps the order, so the largest value becomes the largest code
        amaxes = saturating_cast(amaxes * master_scales, FP16).float() / master_scales
        scales = [weight.scale for weight in weights]
        fresh = power_of_two_scale(amaxes, E4M3, torch.stack(scales))
        memory, codes = self._full["weight"].flat, self._codes["grad"]  # not needed any more
        _encode_masters(memory, self._codes["weight"].flat, codes.flat, master_scales, fresh, self._runs)
        copy_all_([weight.codes for weight in weights], codes.views)
        copy_all_(scales, list(fresh.unbind()))


def _update(full: Flats, codes: Flats, inv_scales: Flats, runs: Tensor, rule: Rule, numbers: Mapping[str, Any]) -> None:
    """First pass: codes -> float32, which the rule then changes."""
    expand = _expander(runs, len(full["weight"]))
    for name, inv_scale in inv_scales.items():
        torch.mul(codes[name].float(), expand(inv_scale), out=full[name])
    rule(full, numbers)


def _encode(full: Flats, codes: Flats, scales: Flats, runs: Tensor) -> None:
    """Second pass: float32 -> codes."""
    expand = _expander(runs, len(full["weight"]))
    for name, scale in scales.items():
        format = FP16 if codes[name].dtype == FP16.dtype else E4M3
        full[name].mul_(expand(scale))
        codes[name].copy_(saturating_cast(full[name], format))


def _encode_masters(
    memory: Tensor, masters: Tensor, codes: Tensor, master_scales: Tensor, scales: Tensor, runs: Tensor
) -> None:
    """Third pass, at O3: float16 codes of the masters -> e4m3 codes; ``memory`` is float32."""
    expand = _expander(runs, len(memory))
    torch.div(masters.float(), expand(master_scales), out=memory)
    codes.copy_(saturating_cast(memory.mul_(expand(scales)), E4M3))


def _expander(runs: Tensor, total: int) -> Callable[[Tensor], Tensor]:
    """Return a function that expands one value per parameter to one value per element: (parameters,) -> (total,).

    ``runs`` has the number of elements of every parameter: (parameters,).
    """
    return lambda values: values.repeat_interleave(runs, output_size=total)


def _flat(buffers: Mapping[str, FlatBuffer]) -> dict[str, Tensor]:
    return {name: buffer.flat for name, buffer in buffers.items()}
