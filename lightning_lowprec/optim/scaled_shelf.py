"""One AdamW step of many scaled parameters at once: decode into flat float32 memory, update, encode with fresh amax.

Every line below is one or two kernels however many parameters there are. The operations are single additions, products,
quotients and roots, which IEEE 754 defines to the last bit: the same on a flat buffer as on each tensor alone. The flat
memory is taken for the step and given back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, kw_only=True)
class Step:
    """The numbers of one step."""

    number: int
    """1 for the first."""
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    seed: int | None
    """Of the stochastic rounding of float16 masters; None rounds to nearest."""
    start: int
    """Position of the first element in the numbering of all elements that share the seed."""


@final
class Shelf:
    """Parameters of codes, of one device and level, that step together."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = list(params)
        names = ("grad", "exp_avg", "exp_avg_sq", "weight")
        self._full = {name: FlatBuffer(self.params, torch.float32) for name in names}
        self._codes = {f.dtype: FlatBuffer(self.params, f.dtype) for f in (E4M3, FP16)}
        views, total = self._full["grad"].views, self._full["grad"].flat.numel()
        starts = [view.storage_offset() for view in views]
        counts = [end - start for start, end in zip(starts, [*starts[1:], total], strict=True)]
        self._counts = torch.tensor(counts, device=views[0].device)
        self._total = total
        self._free()

    @torch.no_grad()
    def update(self, scaled: Sequence[ScaledWeight], states: Sequence[State], step: Step) -> None:
        """Decoupled decay, then AdamW (arXiv 1711.05101, algorithm 2) in float32; all codes are written anew."""
        for buffer in (*self._full.values(), *self._codes.values()):
            buffer.allocate()
        self._read_gradients(scaled)
        for key in ("exp_avg", "exp_avg_sq"):
            self._read(key, [s[key] for s in states], _column(states, f"{key}_scale"))
        masters = [p if s.master is None else s.master for p, s in zip(self.params, scaled, strict=True)]
        scales = [s.scale if s.master_scale is None else s.master_scale for s in scaled]
        self._read("weight", masters, scales)
        self._adamw(step)
        self._write("exp_avg", [s["exp_avg"] for s in states], _column(states, "exp_avg_scale"), E4M3)
        self._write("exp_avg_sq", [s["exp_avg_sq"] for s in states], _column(states, "exp_avg_sq_scale"), FP16)
        self._write("weight", masters, scales, FP16, step)
        if scaled[0].master is not None:  # the weight is the master as it was rounded
            self._read("weight", masters, scales)
            self._write("weight", self.params, [s.scale for s in scaled], E4M3)
        self._free()

    def _adamw(self, step: Step) -> None:
        grad, exp_avg, exp_avg_sq, weight = (buffer.flat for buffer in self._full.values())
        beta1, beta2 = step.betas
        weight.mul_(1 - step.lr * step.weight_decay)
        exp_avg.mul_(beta1).add_(grad * (1 - beta1))
        exp_avg_sq.mul_(beta2).add_(grad.mul_(grad).mul_(1 - beta2))
        denominator = torch.div(exp_avg_sq, 1 - beta2**step.number, out=grad).sqrt_().add_(step.eps)
        weight.sub_((exp_avg / (1 - beta1**step.number)).div_(denominator).mul_(step.lr))

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
        step: Step | None = None,
    ) -> None:
        full, buffer = self._full[name], self._codes[format.dtype]
        if scales is None:
            torch._foreach_copy_(list(codes), full.views)
            return
        amaxes = torch.stack(torch._foreach_norm(full.views, float("inf")))
        fresh = power_of_two_scale(amaxes, format, torch.stack(list(scales)))
        full.flat.mul_(self._per_element(fresh))
        if step is not None and step.seed is not None:
            rounding.stochastic_round_fp16_(full.flat, seed=step.seed, step=step.number, start=step.start)
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
