"""State dicts of optimizers whose moments have 8 bits: they contain what is in memory, not float32 values.

Float32 masters and moments of all parameters, for a checkpoint, would take 12 bytes per parameter of memory where the
run holds 6. So a state dict has codes and exponents of moments, and the remainder of the masters under
``master_remainder``. Loading decodes them for an optimizer that has other masters or moments, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_lowprec.masters import block_moments
from lightning_lowprec.masters.block_moments import CODES, EXPONENTS
from lightning_lowprec.numerics import block_floats
from lightning_lowprec.numerics.flat import local
from lightning_lowprec.numerics.rounding import join_

MASTER_REMAINDER: Final = "master_remainder"
_OPTIONAL: Final = "momentum_buffer"  # state that torch's SGD takes for new where it is missing
_HOOKED: Final = "_lowprec_decodes"


@final
class CodedState:
    """What :func:`taken_out` has taken out of a state dict, by the key of the parameter there."""

    def __init__(self) -> None:
        self.moments: dict[Any, dict[str, Tensor]] = {}
        """Codes and exponents by their names."""
        self.remainders: dict[Any, Tensor] = {}
        """int16, of the parameter's shape."""


def taken_out(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], CodedState]:
    """Return a state dict without codes and remainders, which torch would cast, and what was taken out."""
    found, state = CodedState(), {}
    for key, entry in state_dict["state"].items():
        if isinstance(entry, Mapping):
            coded = list(block_moments.coded(dict(entry)))
            names = [name + end for name in coded for end in (CODES, EXPONENTS)]
            if names:
                found.moments[key] = {name: entry[name] for name in names}
                names += coded  # of `guarded`
            if MASTER_REMAINDER in entry:
                found.remainders[key] = entry[MASTER_REMAINDER]
            entry = {name: value for name, value in entry.items() if name not in (*names, MASTER_REMAINDER)}
        state[key] = entry
    return {**state_dict, "state": state}, found


def guarded(entry: Any) -> Any:
    """Return the state of one parameter with which torch's SGD fails, instead of starting a new momentum.

    An empty ``momentum_buffer`` has the effect. Other optimizers of torch raise ``KeyError`` without our help. What an
    optimizer keeps under other keys is returned as it is.
    """
    codes = entry.get(f"{_OPTIONAL}{CODES}") if isinstance(entry, Mapping) else None
    if codes is None or isinstance(codes, DTensor):
        return entry
    return {**entry, _OPTIONAL: torch.empty(0)}


def params_by_key(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Any, Tensor]:
    """Return the parameters of ``optimizer`` by their keys in a state dict, in the order of the groups."""
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    return {key: p for group, saved in groups for p, key in zip(group["params"], saved["params"], strict=True)}


@torch.no_grad()
def put_moments(optimizer: Optimizer, param: Tensor, coded: Mapping[str, Tensor], *, kept: bool) -> None:
    """Give a parameter coded state: as codes if they are ``kept``, else as float32 values."""
    here = {name: value.to(param.device, copy=True) for name, value in coded.items()}
    optimizer.state[param].update(here if kept else decoded_entry(here, param))


def decoded_entry(entry: Any, param: Tensor) -> Any:
    """Return the state of one parameter with float32 values in the place of codes."""
    if not isinstance(entry, dict):
        return entry
    coded = {name: entry[name] for name in entry if name.endswith((CODES, EXPONENTS))}
    names = list(block_moments.coded(coded))
    gone = {name + end for name in names for end in (CODES, EXPONENTS)}
    values = {name: block_moments.decode(coded, name, param) for name in names}
    return {**{name: value for name, value in entry.items() if name not in gone}, **values}


@torch.no_grad()
def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master, of the local shape, of a bf16 parameter and its remainder."""
    value = local(param).float()
    join_(value, local(remainder).to(value.device))
    return value


@final
class Bytes(NamedTuple):
    """A float8 tensor for ``pickle``, which torch 2.11 reads back with an error; remove this when torch does not."""

    values: Tensor
    """uint8."""
    dtype: torch.dtype


def for_pickle(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state of an optimizer with :class:`Bytes` in the place of float8 tensors."""
    return {param: _mapped(entry, _to_bytes) for param, entry in state.items()}


def from_pickle(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Undo :func:`for_pickle`."""
    return {param: _mapped(entry, _from_bytes) for param, entry in state.items()}


def _mapped(entry: Any, function: Callable[[Any], Any]) -> Any:
    return {name: function(value) for name, value in entry.items()} if isinstance(entry, dict) else entry


def _to_bytes(value: Any) -> Any:
    codes = type(value) is Tensor and value.dtype in block_floats.BY_DTYPE and value.dtype.is_floating_point
    return Bytes(value.view(torch.uint8), value.dtype) if codes else value


def _from_bytes(value: Any) -> Any:
    return value.values.view(value.dtype) if isinstance(value, Bytes) else value


def decode_on_load(optimizer: Optimizer) -> None:
    """Let an optimizer without masters load codes as float32 values."""
    if vars(optimizer).get(_HOOKED):
        return
    vars(optimizer)[_HOOKED] = True
    optimizer.register_load_state_dict_pre_hook(_decoded)


def _decoded(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    plain, found = taken_out(state_dict)
    if not found.moments and not found.remainders:
        return None
    for key, param in params_by_key(optimizer, state_dict).items():
        if key in found.moments:
            plain["state"][key] |= decoded_entry(found.moments[key], param)
    return plain


def moments_kept(moments: Mapping[str, Tensor], keeper: object, param: Tensor) -> bool:
    """Return whether the codes are those that ``keeper`` would make of the moments of ``param``."""
    if not isinstance(keeper, block_moments.BlockMoments):
        return False
    size = block_moments.block_of(param)
    return size > 0 and all(
        local(moments[f"{name}{CODES}"]).dtype == block_moments.format_of(keeper.kind, name).dtype
        and moments[f"{name}{EXPONENTS}"].numel() * size == param.numel()
        for name in block_moments.coded(dict(moments))
    )
