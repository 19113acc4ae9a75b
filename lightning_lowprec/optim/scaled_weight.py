"""Parameters that hold the codes of a small format, with a power-of-two scale beside them (MS-AMP's O1, O2, O3).

| level | parameter | master | what the parameter is worth |
|---|---|---|---|
| O1, O2 | float16 codes | the parameter itself | ``codes * inv_scale`` |
| O3 | float8_e4m3fn codes | float16 codes with a scale of their own | the master, rounded once more |

The Parameter object stays the same; only its ``data`` change. What belongs to it hangs at ``param.scaled``.
"""

from __future__ import annotations

from typing import Any, Final, Literal, final, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowprec.formats import E4M3, FP16, Format
from lightning_lowprec.scaling import amax, power_of_two_scale, saturating_cast

Level = Literal["O1", "O2", "O3"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)


@final
class ScaledWeight:
    """What a parameter of codes is worth, and its gradient.

    Made by :func:`scale_weight_`; ``scale`` and ``master_scale`` are scalar float32 tensors, changed in place by
    a step.
    """

    def __init__(self, scale: Tensor, master: Tensor | None, master_scale: Tensor | None) -> None:
        self.scale = scale
        self.master = master
        self.master_scale = master_scale
        self.grad: Tensor | None = None
        """float8_e4m3fn, of the parameter's shape; worth ``grad * grad_inv_scale``."""
        self.grad_inv_scale: Tensor | None = None

    def to_(self, device: torch.device) -> None:
        """Move everything to ``device``."""
        for name, value in vars(self).items():
            if value is not None:
                setattr(self, name, value.to(device))

    @torch.no_grad()
    def accumulate(self, grad: Tensor) -> None:
        """Add a gradient, any float, to the scaled one, whose amax is taken anew; inf becomes NaN."""
        total = grad.float()
        if self.grad is not None and self.grad_inv_scale is not None:
            total = total + self.grad.float() * self.grad_inv_scale
        scale = power_of_two_scale(amax(total), E4M3)
        self.grad, self.grad_inv_scale = saturating_cast(total * scale, E4M3), scale.reciprocal()


def scale_weight_(param: Parameter, level: Level) -> ScaledWeight:
    """Make ``param`` hold codes, in place, and return what is then at ``param.scaled``.

    Its ``grad`` is float32 from then on. ``param.shape``, the object and its place in modules and optimizers stay.

    Args:
        param: (...) float32, bfloat16 or float16; finite.
        level: "O1" and "O2" keep float16 codes, "O3" float8_e4m3fn codes and a float16 master.

    Raises:
        ValueError: unknown level, or ``param`` holds codes already.
    """
    if level not in LEVELS:
        raise ValueError(f"`level={level!r}` is not valid; expected one of: {', '.join(LEVELS)}.")
    if scaled_of(param) is not None:
        raise ValueError(f"the parameter of shape {tuple(param.shape)} holds {param.dtype} codes already.")
    values = param.detach().float()
    master, master_scale = encode(values, FP16)
    if level == "O3":
        codes, scale = encode(master.float() / master_scale, E4M3)
        scaled = ScaledWeight(scale, master, master_scale)
    else:
        codes, scaled = master, ScaledWeight(master_scale, None, None)
    param.grad = None
    param.data = codes
    attach_(param, scaled)
    return scaled


def attach_(param: Any, scaled: ScaledWeight) -> None:
    """Hang ``scaled`` at a parameter that holds its codes already."""
    param.grad_dtype = torch.float32
    param.scaled = scaled


def scaled_of(param: Any) -> ScaledWeight | None:
    """What hangs at a parameter of codes; None for any other tensor."""
    scaled: ScaledWeight | None = getattr(param, "scaled", None)
    return scaled


@torch.no_grad()
def values_of(param: Tensor) -> Tensor:
    """What a parameter of codes is worth: (...) float32; exactly what the codes say."""
    scaled = scaled_of(param)
    assert scaled is not None, "no codes"
    return param.float() / scaled.scale


@torch.no_grad()
def set_values_(param: Tensor, values: Tensor) -> None:
    """Give a parameter of codes, and its master, other values: (...) any float. What :func:`values_of` gave fits."""
    scaled = scaled_of(param)
    assert scaled is not None, "no codes"
    codes, scale = encode(values.detach().float(), FP16 if scaled.master is None else E4M3)
    if scaled.master is not None and scaled.master_scale is not None:
        master, master_scale = encode(values.detach().float(), FP16)
        scaled.master.copy_(master)
        scaled.master_scale.copy_(master_scale)
    param.copy_(codes)
    scaled.scale.copy_(scale)


def encode(values: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Codes and their scale: (...) float32 -> (...) of the format, scalar float32."""
    scale = power_of_two_scale(amax(values), format)
    return saturating_cast(values * scale, format), scale
