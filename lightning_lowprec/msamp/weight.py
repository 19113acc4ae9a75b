"""Parameters that hold the codes of a small format, with a power-of-two scale beside them (MS-AMP's O1, O2, O3).

| level | parameter | master | value of the parameter |
|---|---|---|---|
| O1, O2 | float16 codes | none: the parameter is precise enough | ``codes * inv_scale`` |
| O3 | float8_e4m3fn codes | float16 codes with another scale | the master, rounded to e4m3 |

The life of a weight, with the file of each stage:

    Parameter in float32
        | amax -> power-of-two scale -> codes                           weight.py
        v
    codes and scale ---- as e4m3 codes ----> three GEMMs                linear.py
        ^                                        |
        |                                        v
        |                     e4m3 gradient and its scale               gradient.py
        |                                        | average over the ranks, one byte per element     ddp.py
        |                                        v
        +---- codes, fresh scale <---- step in float32                  adamw.py, sgd.py, flat_step.py

:mod:`~lightning_lowprec.msamp.fsdp2` draws the same for FSDP2. The Parameter object stays the same, only its ``data``
change. Scales and master are at ``param.msamp_state``.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, Literal, Protocol, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_lowprec.checks import check_choice
from lightning_lowprec.numerics.flat import local
from lightning_lowprec.numerics.formats import E4M3, FP16, Format
from lightning_lowprec.numerics.scaling import amax, power_of_two_scale, saturating_cast
from lightning_lowprec.private import torch as private

Level = Literal["O1", "O2", "O3"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)


class Shards(Protocol):
    """The ranks that share the parameters of codes, each with one shard of every parameter."""

    rank: int
    """The number of this rank among them."""

    def maximum(self, values: Tensor) -> Tensor:
        """Return the maximum over the ranks: (...) float32; a collective. NaN becomes inf."""

    def to_dtensor(self, shard: Tensor, param: Tensor) -> Tensor:
        """Return a tensor that is sharded like ``param`` and has ``shard`` on this rank."""


@final
class MsampWeightState:
    """The scale of a parameter of codes, and its master if it has one. Made by :func:`scale_weight_`.

    Args:
        scale: scalar float32; the step of an optimizer changes it in place.
        master: (...) float16 codes; None at O1 and O2.
        master_scale: scalar float32, for the master.
    """

    def __init__(self, scale: Tensor, master: Tensor | None, master_scale: Tensor | None) -> None:
        self.scale = scale
        self.master = master
        self.master_scale = master_scale
        self.pending_master: Tensor | None = None
        """Values of a master, (...) float32, that was loaded before its weight."""
        self.shards: Shards | None = None
        """None: the parameter is whole."""
        self._param: weakref.ref[Any] | None = None
        self._version = 0

    def bind(self, param: Any) -> None:
        """Become the state of a parameter that holds the codes already."""
        param.grad_dtype = torch.float32
        param.msamp_state = self
        self._param = weakref.ref(param)
        self.record_write()

    def to_(self, device: torch.device) -> None:
        """Move scales and masters to ``device``."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def master_values(self) -> Tensor | None:
        """Return the values of the master, (...) float32; None without a master."""
        if self.master is None or self.master_scale is None:
            return None
        return self.master.float() / self.master_scale

    def set_master_values(self, values: Tensor) -> None:
        """Encode (...) float32 as the master; for a sharded parameter a collective."""
        assert self.master is not None
        assert self.master_scale is not None
        _store(*encode(values, FP16, self.shards), self.master, self.master_scale)

    def record_write(self) -> None:
        """Remember that codes and scale were written together."""
        param = self._bound()
        if param is not None and not param.is_inference():
            self._version = param._version

    def check_writes(self) -> None:
        """Raise RuntimeError if other code wrote to the codes. Writes through ``param.data`` are not noticed."""
        param = self._bound()
        if self.shards is None and param is not None and not param.is_inference() and param._version != self._version:
            raise RuntimeError(
                f"a weight of shape {tuple(param.shape)} that is kept as codes with a scale (MS-AMP) was written to,"
                " without the scale. Load the model's state dict again. Write with"
                " `lightning_lowprec.msamp.set_values_(weight, values)`, read with `values_of(weight)`; to average"
                " models, average their state dicts."
            )

    def _bound(self) -> Any:
        return None if self._param is None else self._param()

    def __getstate__(self) -> dict[str, Any]:
        """Return a copy's attributes: a copy has no parameter until :meth:`bind`."""
        return {**self.__dict__, "_param": None}


def scale_weight_(param: Parameter, level: Level) -> MsampWeightState:
    """Make ``param`` hold codes, in place, and return its state, which is then at ``param.msamp_state``.

    From then on ``param.grad`` is float32. ``param.shape``, the object and its place in modules and optimizers stay.

    Args:
        param: (...) float32, bfloat16 or float16; finite.
        level: "O1" and "O2" keep float16 codes, "O3" float8_e4m3fn codes and a float16 master.

    Raises:
        ValueError: an unknown level, or ``param`` holds codes already.
    """
    private.check(private.MSAMP)
    check_choice("level", level, LEVELS)
    if msamp_state_of(param) is not None:
        raise ValueError(f"the parameter of shape {tuple(param.shape)} holds {param.dtype} codes already.")
    master, master_scale = encode(param.detach().float(), FP16)
    if level == "O3":
        codes, scale = encode(master.float() / master_scale, E4M3)
        state = MsampWeightState(scale, master, master_scale)
    else:
        codes, state = master, MsampWeightState(master_scale, None, None)
    param.grad = None
    param.data = codes
    state.bind(param)
    return state


def msamp_state_of(param: Any) -> MsampWeightState | None:
    """Return the state of a parameter of codes; None for any other tensor."""
    state: MsampWeightState | None = getattr(param, "msamp_state", None)
    return state


def required_state_of(param: Any) -> MsampWeightState:
    """Return the state of a parameter that is known to hold codes."""
    state = msamp_state_of(param)
    assert state is not None, "no codes"
    return state


def coded_weight(model: nn.Module) -> str | None:
    """Return the fqn of the first parameter of ``model`` that is kept as codes; None if there is none."""
    return next((fqn for fqn, p in model.named_parameters() if msamp_state_of(p) is not None), None)


def codes_of(param: Any) -> Tensor:
    """Return the codes of a parameter: the parameter itself, or this rank's codes if it is sharded or gathered."""
    codes: Tensor = getattr(param, "codes", param)
    return codes


@torch.no_grad()
def values_of(param: Tensor) -> Tensor:
    """Return the exact values of a parameter of codes: (...) float32, sharded like the parameter."""
    state = required_state_of(param)
    state.check_writes()
    return sharded_like(codes_of(param).float() / state.scale, param)


@torch.no_grad()
def set_values_(param: Tensor, values: Tensor) -> None:
    """Give a parameter of codes other values: (...) any float, for example those of :func:`values_of`.

    A master (or one that :func:`set_master_` left waiting) that rounds to the values stays; else the values become the
    master. For a sharded parameter a collective: every rank calls it.
    """
    state = required_state_of(param)
    given = local(values.detach()).float()
    master = state.master_values()
    if master is not None:
        rounded = _rounded(given, state.shards)
        candidates = [m for m in (given, master, state.pending_master) if m is not None]
        fitting = [m for m in candidates if _equal_on_all_ranks(_rounded(m, state.shards), rounded, state.shards)]
        state.set_master_values((fitting or [given])[-1])
        state.pending_master = None
    format = FP16 if master is None else E4M3
    _store(*encode(given, format, state.shards), codes_of(param), state.scale)
    state.record_write()


@torch.no_grad()
def set_master_(param: Tensor, master: Tensor) -> None:
    """Give a parameter that has a master another master, (...) any float, if that rounds to the parameter.

    A master that does not round to the parameter waits until the parameter gets other values, because an optimizer may
    be loaded before its model. For a sharded parameter a collective: every rank calls it.
    """
    state = msamp_state_of(param)
    if state is None or state.master is None:
        return
    values = local(master).to(param.device).float()
    if _equal_on_all_ranks(_rounded(values, state.shards), local(values_of(param)), state.shards):
        state.set_master_values(values)
    else:
        state.pending_master = values


def master_of(param: Tensor) -> Tensor | None:
    """Return the values of a parameter's master, (...) float32, sharded like the parameter; None without a master."""
    state = msamp_state_of(param)
    values = None if state is None else state.master_values()
    return None if values is None else sharded_like(values, param)


def sharded_like(part: Tensor, param: Tensor) -> Tensor:
    """Return ``part`` as a DTensor if the parameter of codes is one; else ``part`` itself."""
    shards = required_state_of(param).shards
    return part if shards is None or not hasattr(param, "to_local") else shards.to_dtensor(part, param)


def encode(values: Tensor, format: Format, shards: Shards | None = None) -> tuple[Tensor, Tensor]:
    """Return codes and their scale: (...) float32 -> (...) of the format, scalar float32; all shards have one scale."""
    largest = amax(values)
    scale = power_of_two_scale(largest if shards is None else shards.maximum(largest), format)
    return saturating_cast(values * scale, format), scale


def _rounded(values: Tensor, shards: Shards | None) -> Tensor:
    """Return the values of a level O3 parameter whose master has ``values``."""
    master, master_scale = encode(values, FP16, shards)
    codes, scale = encode(master.float() / master_scale, E4M3, shards)
    return codes.float() / scale


def _equal_on_all_ranks(a: Tensor, b: Tensor, shards: Shards | None) -> bool:
    differ = torch.tensor(0.0 if torch.equal(a, b) else 1.0, device=a.device)
    return not bool(differ if shards is None else shards.maximum(differ))


def _store(codes: Tensor, scale: Tensor, into: Tensor, into_scale: Tensor) -> None:
    into.copy_(codes)
    into_scale.copy_(scale)
