"""Parameters that hold the codes of a small format, with a power-of-two scale beside them (MS-AMP's O1, O2, O3).

| level | parameter | master | value of the parameter |
|---|---|---|---|
| O1, O2 | float16 codes | none: the parameter is precise enough | ``codes * inv_scale`` |
| O3 | float8_e4m3fn codes | float16 codes with another scale | the master, rounded to e4m3 |

The Parameter object stays the same, only its ``data`` change. Scales and master are at ``param.msamp_state``. The life
of a weight is drawn in docs/architecture.md.
"""

from __future__ import annotations

from typing import Any, Final, Literal, final, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_lowprec.checks import check_choice
from lightning_lowprec.numerics.flat import local
from lightning_lowprec.numerics.formats import E4M3, FP16, Format
from lightning_lowprec.numerics.scaling import amax, power_of_two_scale, saturating_cast
from lightning_lowprec.private import torch as private

Level = Literal["O1", "O2", "O3"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)


@final
class Shards:
    """The ranks that share parameters of codes: each has one shard of every parameter, and the scale of the whole.

    Args:
        mesh: the mesh that ``fully_shard`` got; its last dimension shards.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group(mesh.ndim - 1)
        self.rank: int = mesh.get_local_rank(mesh.ndim - 1)

    def maximum(self, values: Tensor) -> Tensor:
        """Return the maximum over the ranks: (...) float32; a collective. NaN becomes inf, which a maximum keeps."""
        largest = torch.where(values.isnan(), torch.inf, values)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return largest


@final
class MsampWeightState:
    """The scale of a parameter of codes, and its master if it has one. Made by :func:`scale_weight_`.

    Args:
        scale: scalar float32; the step of an optimizer changes it in place.
        master: (...) float16 codes; None at O1 and O2.
        master_scale: scalar float32, for the master.
    """

    def __init__(self, scale: Tensor, master: Tensor | None = None, master_scale: Tensor | None = None) -> None:
        self.scale = scale
        self.master = master
        self.master_scale = master_scale
        self.pending_master: Tensor | None = None
        """Values of a master, (...) float32, that was loaded before its weight."""
        self.shards: Shards | None = None
        """None: the parameter is whole."""
        self._version = 0

    def bind(self, param: Any) -> None:
        """Become the state of a parameter that holds the codes already."""
        param.grad_dtype = torch.float32
        param.msamp_state = self
        self.record_write(param)

    def to_(self, device: torch.device) -> None:
        """Move scales and masters to ``device``."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def stepped(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the float16 codes that an optimizer steps, and their scale: the master, or else ``codes``."""
        if self.master is None or self.master_scale is None:
            return codes, self.scale
        return self.master, self.master_scale

    def record_write(self, param: Tensor) -> None:
        """Remember that the codes of ``param`` and the scale were written together."""
        if not param.is_inference():
            self._version = private.version_of(param)

    def check_writes(self, param: Tensor) -> None:
        """Raise RuntimeError if other code wrote to the codes. Writes through ``param.data`` are not noticed."""
        if codes_of(param) is param and not param.is_inference() and private.version_of(param) != self._version:
            raise RuntimeError(
                f"a weight of shape {tuple(param.shape)} that is kept as codes with a scale (MS-AMP) was written to,"
                " without the scale. Load the model's state dict again. Write with"
                " `lightning_lowprec.msamp.set_values_(weight, values)`, read with `values_of(weight)`; to average"
                " models, average their state dicts."
            )


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
    codes, scale = encode(param.detach().float(), FP16)
    state = MsampWeightState(scale)
    if level == "O3":
        master, master_scale = codes, scale
        codes, scale = encode(master.float() / master_scale, E4M3)
        state = MsampWeightState(scale, master, master_scale)
    param.grad = None
    param.data = codes
    state.bind(param)
    return state


def msamp_state_of(param: Any) -> MsampWeightState | None:
    """Return the state of a parameter of codes; None for any other tensor."""
    state: MsampWeightState | None = getattr(param, "msamp_state", None)
    return state


def required_state_of(param: Any) -> MsampWeightState:
    """Return the state of a parameter of codes; raise TypeError if another tensor took its place."""
    state = msamp_state_of(param)
    if state is None:
        raise TypeError(
            f"the weight of a ScaledLinear (MS-AMP) is a plain {tuple(param.shape)} tensor of {param.dtype}; expected"
            " its parameter of codes. Parametrize, prune or normalize weights before the conversion, which then leaves"
            " the layer unconverted; give `torch.func.functional_call` the parameters, not a state dict."
        )
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
    state.check_writes(param)
    return sharded_like(codes_of(param).float() / state.scale, param)


@torch.no_grad()
def set_values_(param: Tensor, values: Tensor) -> None:
    """Give a parameter of codes other values: (...) any float, for example those of :func:`values_of`.

    A master (or one that :func:`set_master_` left waiting) that rounds to the values stays; else the values become the
    master. For a sharded parameter a collective: every rank calls it.
    """
    state = required_state_of(param)
    codes, given = codes_of(param), local(values.detach()).float()
    if state.master is not None:
        master, master_scale = state.stepped(codes)
        rounded, best = _rounded(given, state.shards), given
        for candidate in (master.float() / master_scale, state.pending_master):
            if candidate is not None and _rounds_to(rounded, candidate, state.shards):
                best = candidate
        encode_into(master, master_scale, best, FP16, state.shards)
        state.pending_master = None
    encode_into(codes, state.scale, given, FP16 if state.master is None else E4M3, state.shards)
    state.record_write(param)


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
    if _rounds_to(local(values_of(param)), values, state.shards):
        encode_into(*state.stepped(values), values, FP16, state.shards)
    else:
        state.pending_master = values


def master_of(param: Tensor) -> Tensor | None:
    """Return the values of a parameter's master, (...) float32, sharded like the parameter; None without a master."""
    state = msamp_state_of(param)
    if state is None or state.master is None:
        return None
    master, scale = state.stepped(state.master)
    return sharded_like(master.float() / scale, param)


def sharded_like(part: Tensor, param: Tensor) -> Tensor:
    """Return ``part`` as a DTensor if the parameter of codes is one; else ``part`` itself."""
    return private.with_local_tensor(part, param) if isinstance(param, DTensor) else part


def encode(values: Tensor, format: Format, shards: Shards | None = None) -> tuple[Tensor, Tensor]:
    """Return codes and their scale: (...) float32 -> (...) of the format, scalar float32; all shards have one scale."""
    largest = amax(values)
    scale = power_of_two_scale(largest if shards is None else shards.maximum(largest), format)
    return saturating_cast(values * scale, format), scale


def encode_into(codes: Tensor, scale: Tensor, values: Tensor, format: Format, shards: Shards | None) -> None:
    """Write the codes of ``values`` and their scale into tensors."""
    new_codes, new_scale = encode(values, format, shards)
    codes.copy_(new_codes)
    scale.copy_(new_scale)


def _rounded(master: Tensor, shards: Shards | None) -> Tensor:
    """Return the values of a level O3 parameter whose master has the values ``master``."""
    codes, scale = encode(master, FP16, shards)
    codes, scale = encode(codes.float() / scale, E4M3, shards)
    return codes.float() / scale


def _rounds_to(rounded: Tensor, master: Tensor, shards: Shards | None) -> bool:
    """Whether on every rank a parameter has the values ``rounded`` if its master has the values ``master``."""
    differ = torch.tensor(float(not torch.equal(_rounded(master, shards), rounded)), device=rounded.device)
    return not bool(differ if shards is None else shards.maximum(differ))
