"""Parameters that hold the codes of a small format, with a power-of-two scale beside them (MS-AMP's O1, O2, O3).

| level | parameter | master | what the parameter is worth |
|---|---|---|---|
| O1, O2 | float16 codes | the parameter itself | ``codes * inv_scale`` |
| O3 | float8_e4m3fn codes | float16 codes with a scale of their own | the master, rounded once more |

The Parameter object stays the same; only its ``data`` change. What belongs to it hangs at ``param.msamp_state``.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, Literal, Protocol, final, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.numerics.flat import local
from lightning_lowprec.numerics.formats import E4M3, FP16, Format
from lightning_lowprec.numerics.scaling import amax, power_of_two_scale, saturating_cast

Level = Literal["O1", "O2", "O3"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)


class Shards(Protocol):
    """How parameters of codes are sharded: what of them is here, what the other ranks have."""

    rank: int
    """Among those that share a parameter."""

    def maximum(self, values: Tensor) -> Tensor:
        """Over the ranks: (...) float32; a collective. NaN comes back as inf."""

    def like(self, shard: Tensor, param: Tensor) -> Tensor:
        """A sharded tensor of which this rank has ``shard``, as ``param`` is."""


@final
class MsampWeightState:
    """What a parameter of codes is worth.

    Made by :func:`scale_weight_`; ``scale`` and ``master_scale`` are scalar float32 tensors, changed in place by
    a step. The gradient is at ``param.grad``, a :class:`~lightning_lowprec.msamp.gradient.ScaledGradient`.
    """

    def __init__(self, scale: Tensor, master: Tensor | None, master_scale: Tensor | None) -> None:
        self.scale = scale
        self.master = master
        self.master_scale = master_scale
        self.offered: Tensor | None = None
        """A master, (...) float32, that was loaded before the weight it belongs to."""
        self.shards: Shards | None = None
        """None: the parameter is whole."""
        self._param: weakref.ref[Any] | None = None
        self._version = 0

    def to_(self, device: torch.device) -> None:
        """Move everything to ``device``, the gradient too."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    @property
    def gradient(self) -> ScaledGradient | None:
        """``param.grad`` if it is scaled."""
        param = None if self._param is None else self._param()
        grad = None if param is None else param.grad
        return grad if isinstance(grad, ScaledGradient) else None

    @property
    def grad(self) -> Tensor | None:
        """float8_e4m3fn, of the parameter's shape; worth ``grad * grad_inv_scale``."""
        return None if self.gradient is None else self.gradient.codes

    @property
    def grad_inv_scale(self) -> Tensor | None:
        """Scalar float32; NaN if the gradient has a value that is not finite."""
        return None if self.gradient is None else self.gradient.inv_scale

    @torch.no_grad()
    def accumulate(self, grad: Tensor) -> None:
        """Add a gradient, any float, to the scaled one, whose amax is taken anew; inf becomes NaN."""
        assert self._param is not None
        param: Any = self._param()
        total = grad.float() if self.gradient is None else grad.float() + self.gradient.decode()
        param.grad = ScaledGradient.of(total)

    def note_write(self) -> None:
        """The codes were written together with their scale."""
        param = None if self._param is None else self._param()
        if param is not None and not param.is_inference():
            self._version = param._version

    def check_writes(self) -> None:
        """Raise RuntimeError if anybody else wrote to the codes; writes through ``param.data`` cannot be seen."""
        param = None if self._param is None else self._param()
        if self.shards is None and param is not None and not param.is_inference() and param._version != self._version:
            raise RuntimeError(
                f"a weight of shape {tuple(param.shape)} that is kept as codes with a scale (MS-AMP) was written to,"
                " without the scale. Load the model's state dict again. Write with"
                " `lightning_lowprec.msamp.set_values_(weight, values)`, read with `values_of(weight)`; to average"
                " models, average their state dicts."
            )

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no parameter until :func:`bind_state`."""
        return {**self.__dict__, "_param": None}


def scale_weight_(param: Parameter, level: Level) -> MsampWeightState:
    """Make ``param`` hold codes, in place, and return what is then at ``param.msamp_state``.

    Its ``grad`` is float32 from then on. ``param.shape``, the object and its place in modules and optimizers stay.

    Args:
        param: (...) float32, bfloat16 or float16; finite.
        level: "O1" and "O2" keep float16 codes, "O3" float8_e4m3fn codes and a float16 master.

    Raises:
        ValueError: unknown level, or ``param`` holds codes already.
    """
    if level not in LEVELS:
        raise ValueError(f"`level={level!r}` is not valid; expected one of: {', '.join(LEVELS)}.")
    if msamp_state_of(param) is not None:
        raise ValueError(f"the parameter of shape {tuple(param.shape)} holds {param.dtype} codes already.")
    values = param.detach().float()
    master, master_scale = encode(values, FP16)
    if level == "O3":
        codes, scale = encode(master.float() / master_scale, E4M3)
        scaled = MsampWeightState(scale, master, master_scale)
    else:
        codes, scaled = master, MsampWeightState(master_scale, None, None)
    param.grad = None
    param.data = codes
    bind_state(param, scaled)
    return scaled


def bind_state(param: Any, scaled: MsampWeightState) -> None:
    """Hang ``scaled`` at a parameter that holds its codes already."""
    param.grad_dtype = torch.float32
    param.msamp_state = scaled
    scaled._param = weakref.ref(param)
    scaled.note_write()


def msamp_state_of(param: Any) -> MsampWeightState | None:
    """What hangs at a parameter of codes; None for any other tensor."""
    scaled: MsampWeightState | None = getattr(param, "msamp_state", None)
    return scaled


def coded_weight(model: nn.Module) -> str | None:
    """Return the fqn of the first parameter of ``model`` that is kept as codes, or None."""
    return next((fqn for fqn, p in model.named_parameters() if msamp_state_of(p) is not None), None)


def codes_of(param: Any) -> Tensor:
    """The codes of a parameter: itself, or if it is sharded or gathered those that are behind it, on this rank."""
    codes: Tensor = getattr(param, "codes", param)
    return codes


@torch.no_grad()
def values_of(param: Tensor) -> Tensor:
    """What a parameter of codes is worth: (...) float32; exactly what the codes say. Sharded as the parameter is."""
    scaled = _needed(param)
    scaled.check_writes()
    return _like(codes_of(param).float() / scaled.scale, param)


@torch.no_grad()
def set_values_(param: Tensor, values: Tensor) -> None:
    """Give a parameter of codes other values: (...) any float. What :func:`values_of` gave fits.

    A master that rounds to them stays, or one that was offered and does; else they are the master's values too.
    For a sharded parameter a collective: every rank calls it.
    """
    scaled = _needed(param)
    given = local(values.detach()).float()
    if scaled.master is not None and scaled.master_scale is not None:
        masters = (given, scaled.master.float() / scaled.master_scale, scaled.offered)
        rounded = _rounded(given, scaled.shards)
        fits = [m for m in masters if m is not None and _equal(_rounded(m, scaled.shards), rounded, scaled.shards)]
        _store(*encode((fits or [given])[-1], FP16, scaled.shards), scaled.master, scaled.master_scale)
        scaled.offered = None
    format = FP16 if scaled.master is None else E4M3
    _store(*encode(given, format, scaled.shards), codes_of(param), scaled.scale)
    scaled.note_write()


@torch.no_grad()
def set_master_(param: Tensor, master: Tensor) -> None:
    """Offer a master, (...) any float, to a parameter that has one: taken if it rounds to the parameter.

    If it does not, it waits until the parameter gets other values: an optimizer may be loaded before its model.
    For a sharded parameter a collective: every rank calls it.
    """
    scaled = msamp_state_of(param)
    if scaled is None or scaled.master is None or scaled.master_scale is None:
        return
    values = local(master).to(param.device).float()
    if _equal(_rounded(values, scaled.shards), local(values_of(param)), scaled.shards):
        _store(*encode(values, FP16, scaled.shards), scaled.master, scaled.master_scale)
    else:
        scaled.offered = values


def master_of(param: Tensor) -> Tensor | None:
    """The values of a parameter's master, (...) float32, sharded as it is; None if it has none beside itself."""
    scaled = msamp_state_of(param)
    if scaled is None or scaled.master is None or scaled.master_scale is None:
        return None
    return _like(scaled.master.float() / scaled.master_scale, param)


def _needed(param: Tensor) -> MsampWeightState:
    scaled = msamp_state_of(param)
    assert scaled is not None, "no codes"
    return scaled


def _like(part: Tensor, param: Tensor) -> Tensor:
    shards = _needed(param).shards
    return part if shards is None or not hasattr(param, "to_local") else shards.like(part, param)


def _rounded(values: Tensor, shards: Shards | None) -> Tensor:
    """What a level O3 parameter with a master of these values is worth."""
    master, master_scale = encode(values, FP16, shards)
    codes, scale = encode(master.float() / master_scale, E4M3, shards)
    return codes.float() / scale


def _equal(a: Tensor, b: Tensor, shards: Shards | None) -> bool:
    """On every rank, and with the same answer there."""
    differ = torch.tensor(0.0 if torch.equal(a, b) else 1.0, device=a.device)
    return not bool(differ if shards is None else shards.maximum(differ))


def _store(codes: Tensor, scale: Tensor, into: Tensor, into_scale: Tensor) -> None:
    into.copy_(codes)
    into_scale.copy_(scale)


def encode(values: Tensor, format: Format, shards: Shards | None = None) -> tuple[Tensor, Tensor]:
    """Codes and their scale: (...) float32 -> (...) of the format, scalar float32; one scale for all shards."""
    largest = amax(values)
    scale = power_of_two_scale(largest if shards is None else shards.maximum(largest), format)
    return saturating_cast(values * scale, format), scale
