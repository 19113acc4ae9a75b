"""Optimizer state in 8 bits between steps: codes and exponents of blocks, see ``numerics/block_floats.py``.

The state ``exp_avg`` of a parameter, for example, is two plain tensors between steps: ``exp_avg_codes``, of the
parameter's shape, and ``exp_avg_exponents``, (rows, blocks per row) uint8. They are sharded like the parameter; blocks
lie inside rows, so that codes do not depend on the number of ranks. Within a step ``exp_avg`` is float32, unless a
kernel steps the parameter. Small parameters, those whose rows are not multiples of 32 numbers, and state that is no
average of gradients stay float32.

A state dict has what is in memory: codes and exponents, and the remainders of masters under ``master_remainder``.
Float32 masters and moments of all parameters would take 12 bytes per parameter of memory where the run holds 6. Loading
decodes for an optimizer that has other masters or moments, or none.
"""

import functools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lightning_lowprec.conversion import backends
from lightning_lowprec.masters.stores import Store
from lightning_lowprec.messages import info, warn
from lightning_lowprec.numerics import block_floats
from lightning_lowprec.numerics.block_floats import BlockFormat
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.rounding import bits_of_positions, join_, reconcile
from lightning_lowprec.private.torch import dtensor, local_tensor, tree_map_only, with_local_tensor

CODES: Final = "_codes"
EXPONENTS: Final = "_exponents"
MASTER_PARAM: Final = "master_param"  # the name that Megatron's and NeMo's checkpoints use
MASTER_REMAINDER: Final = "master_remainder"
LEAST: Final = 4096  # numbers of the smallest parameter whose state is coded
MOMENTS: Final[Mapping[str, BlockFormat]] = {
    **dict.fromkeys(("exp_avg", "momentum_buffer", "grad_avg"), block_floats.E4M3),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta"), block_floats.E5M3),
}
"""The averages of gradients in torch's optimizers, and the formats of their codes: E5M3 where none is negative.

Other state stays float32: averaged weights, previous gradients and step sizes need more than 3 bits of mantissa.
"""
_SEED_STEP: Final = 1 << 32  # added to the seed per kind of state: weights and moments round independently
_CLIPPING: Final = ("clip_norm", "last_norm")  # in groups of checkpoints by a form whose backward pass updated weights
_OPTIONAL: Final = "momentum_buffer"  # state that torch's SGD takes for new where it is missing
_HOOKED: Final = "_lowprec_decodes"
State = MutableMapping[str, Any]


def float32_state(entry: object) -> Any:
    """Return the state of one parameter with its half-precision tensors in float32."""
    return tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALF_DTYPES else t, entry)


def block_of(param: Tensor) -> int:
    """Return how many numbers of ``param`` share an exponent, or 0 if its state stays float32."""
    if param.dim() < 2 or param.numel() < LEAST or not is_dense(local_tensor(param)):
        return 0
    row = _row(param)
    return block_floats.block_size(row) if row else 0


def coded(state: Mapping[str, object]) -> list[str]:
    """Return the names of the state that is coded."""
    names = []
    for key in state:
        name = key.removesuffix(CODES)
        if name != key and f"{name}{EXPONENTS}" in state:
            names.append(name)
    return names


@torch.no_grad()
def decode(state: Mapping[str, Any], name: str, param: Tensor) -> Tensor:
    """Return the float32 values of coded state, of the shape of ``param``."""
    whole = state[f"{name}{CODES}"], state[f"{name}{EXPONENTS}"]
    block = whole[0].numel() // whole[1].numel()
    codes, exponents = map(local_tensor, whole)
    row = _row(param)
    if not row or row % block:  # on all ranks, or on none
        raise ValueError(
            f"the codes of {name!r} of a parameter of shape {tuple(param.shape)} share an exponent per {block} numbers,"
            " and the ranks of a tensor-parallel group have parts of such blocks now. Load the checkpoint with the"
            " `tensor_parallel_size` that it was saved with."
        )
    in_line = codes.as_strided((codes.numel(),), (1,))
    flat = block_floats.from_blocks(in_line, exponents.reshape(-1), block, block_floats.BY_DTYPE[codes.dtype])
    return _like(param, flat.as_strided(codes.shape, codes.stride()))


def adam_state(group: Mapping[str, object], param: Tensor) -> State:
    """Return the state of Adam before its first step, as torch makes it, with codes."""
    on_gpu = group.get("capturable") or group.get("fused")
    state: State = {"step": torch.zeros((), device=param.device if on_gpu else "cpu", dtype=torch.float32)}
    for name in ("exp_avg", "exp_avg_sq"):
        shard = local_tensor(param)
        codes = torch.zeros_like(shard, dtype=torch.uint8).view(MOMENTS[name].dtype)
        exponents = torch.zeros(shard.numel() // block_of(param), dtype=torch.uint8, device=shard.device)
        _set(state, name, param, codes, exponents)
    return state


def decode_in_place(entry: State, param: Tensor) -> None:
    """Make the state of one parameter float32."""
    for name in coded(entry):
        values = decode(entry, name, param)
        del entry[f"{name}{CODES}"], entry[f"{name}{EXPONENTS}"]
        entry[name] = values


def decoded_entry(entry: object, param: Tensor) -> Any:
    """Return a copy of the state of one parameter with float32 values in the place of codes."""
    if not isinstance(entry, dict):
        return entry
    plain = dict(entry)
    decode_in_place(plain, param)
    return plain


@torch.no_grad()
def encode_state(state: Mapping[Tensor, State], store: Store, step: int) -> None:
    """Encode the float32 state of a store's parameters, in place; ``step`` counts the steps before."""
    for index, param in enumerate(store.params):
        entry = state.get(param, {})
        if entry and (block := block_of(param)):
            moments: list[str] = []
            others: list[str] = []
            for name in sorted(entry):
                value = entry[name]
                if isinstance(value, Tensor) and value.dtype == torch.float32 and value.numel() >= param.numel():
                    (moments if name in MOMENTS and value.shape == param.shape else others).append(name)
            if others:
                _warn_of_float32(", ".join(f"`{name}`" for name in others))
            for number, name in enumerate(moments, start=1):
                values = local_tensor(entry.pop(name))
                seed = store.seed + number * _SEED_STEP
                bits = bits_of_positions(values.numel(), seed, step, store.positions[index], values.device)
                in_line = values.as_strided((values.numel(),), (1,))
                codes, exponents = block_floats.to_blocks(in_line, bits, block, MOMENTS[name])
                _set(entry, name, param, codes.as_strided(values.shape, values.stride()), exponents)


@functools.cache  # once per process
def _warn_of_float32(names: str) -> None:
    warn(
        f"`moments='8bit'`: the optimizer's state {names} stays float32, 4 bytes per parameter, because it is not known"
        " to be an average of gradients. AdamW, Adam, SGD, RMSprop and Muon of torch have moments of 8 bits.",
        stacklevel=2,
    )


def _set(state: State, name: str, param: Tensor, codes: Tensor, exponents: Tensor) -> None:
    state[f"{name}{CODES}"] = _like(param, codes)
    per_row = _row(param) // block_of(param)
    columns = param.numel() // param.shape[0] // block_of(param)
    state[f"{name}{EXPONENTS}"] = _like(param, exponents.view(codes.shape[0], per_row), columns)


def _like(param: Tensor, shard: Tensor, columns: int = 0) -> Tensor:
    """Return ``shard`` as a DTensor if ``param`` is one, of its shape or with ``columns`` numbers per row of it."""
    if columns and isinstance(param, DTensor):
        return dtensor(shard, param.device_mesh, param.placements, (param.shape[0], columns), (columns, 1))
    return with_local_tensor(shard, param)


def _row(param: Tensor) -> int:
    """Return how many numbers of a row are on this rank; 0 if ranks have unequal parts of rows, or no whole parts."""
    parts = 1
    for dim, placement in enumerate(param.placements if isinstance(param, DTensor) else ()):
        if isinstance(placement, Shard) and placement.dim > 0:
            parts *= param.device_mesh.size(dim) if placement.dim == 1 else 0  # type: ignore[attr-defined]
    return 0 if not parts or (parts > 1 and param.shape[1] % parts) else param.numel() // param.shape[0] // parts


def is_dense(tensor: Tensor) -> bool:
    """Return whether every element of the tensor's memory is an element of the tensor, once."""
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


# ---- in state dicts


Taken = dict[Any, dict[str, Tensor]]
"""Tensors that were taken out of a state dict, by the key of the parameter there and by their names."""


def taken_out(state_dict: Mapping[str, Any], *names: str) -> tuple[dict[str, Any], Taken, Taken]:
    """Return a state dict without codes, which torch would cast, and without ``names``; the codes; and the others."""
    codes: Taken = {}
    others: Taken = {}
    state = dict(state_dict["state"])
    for key, entry in state_dict["state"].items():
        if isinstance(entry, Mapping):
            moments = coded(entry)
            codes[key] = {name + end: entry[name + end] for name in moments for end in (CODES, EXPONENTS)}
            others[key] = {name: entry[name] for name in names if name in entry}
            gone = {*codes[key], *moments, *names}  # `moments`: of `guarded`
            state[key] = {name: value for name, value in entry.items() if name not in gone}
            if entry and entry.keys() == others[key].keys():
                del state[key]  # Adam would take an empty entry for its own
    return {**state_dict, "state": state, "param_groups": _without_norms(state_dict["param_groups"])}, codes, others


def _without_norms(groups: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """Return parameter groups without the norms by which updates in the backward pass were clipped; log that."""
    if not any(_CLIPPING[1] in group for group in groups):
        return [dict(group) for group in groups]
    info(
        "The checkpoint is of a precision that updated weights in the backward pass. Its norm of the last gradients is"
        " not used: gradients are clipped by the norm of the same step."
    )
    return [{name: value for name, value in group.items() if name not in _CLIPPING} for group in groups]


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


def is_our_format(moments: Mapping[str, Tensor], param: Tensor) -> bool:
    """Return whether the codes are those that :func:`encode_state` would make."""
    size = block_of(param)
    return size > 0 and all(
        name in MOMENTS
        and local_tensor(moments[f"{name}{CODES}"]).dtype == MOMENTS[name].dtype
        and moments[f"{name}{EXPONENTS}"].numel() * size == param.numel()
        for name in coded(moments)
    )


@torch.no_grad()
def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master, contiguous and of the local shape, of a bf16 parameter and its remainder."""
    value = local_tensor(param).float().contiguous()
    join_(value, local_tensor(remainder).to(value.device).contiguous())
    return value


def decode_on_load(optimizer: Optimizer) -> None:
    """Let an optimizer without masters load codes as float32 values."""
    if not vars(optimizer).get(_HOOKED):
        vars(optimizer)[_HOOKED] = True
        optimizer.register_load_state_dict_pre_hook(_decoded)


@torch.no_grad()
def _decoded(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    plain, codes, masters = taken_out(state_dict, MASTER_PARAM, MASTER_REMAINDER)
    if not any((*codes.values(), *masters.values())):
        return None
    for key, param in params_by_key(optimizer, state_dict).items():
        if codes.get(key):
            plain["state"][key] |= decoded_entry(codes[key], param)
        held, weight = masters.get(key, {}), local_tensor(param)
        if backends.keeps_master(param) and held:  # MS-AMP's
            plain["state"][key] = {**plain["state"].get(key, {}), **held}
            continue
        master = held.get(MASTER_PARAM)
        if master is None and MASTER_REMAINDER in held:
            master = joined(param.bfloat16(), held[MASTER_REMAINDER])
        if master is not None and weight.dtype == torch.float32:  # the weight was loaded rounded
            weight.copy_(reconcile(local_tensor(master).to(weight.device), weight))
    return plain


def for_pickle(state: Mapping[object, object], *, undo: bool = False) -> dict[Any, Any]:
    """Return the state of an optimizer with uint8 in the place of float8: torch 2.11 cannot read float8 pickles back.

    With ``undo``, return the state that such a state was made from.
    """

    def viewed(entry: Any) -> Any:
        names = [name for name in coded(entry) if type(entry[f"{name}{CODES}"]) is Tensor]
        dtypes = {f"{name}{CODES}": MOMENTS[name].dtype if undo else torch.uint8 for name in names}
        return {**entry, **{name: entry[name].view(dtype) for name, dtype in dtypes.items()}}

    return {param: viewed(entry) if isinstance(entry, dict) else entry for param, entry in state.items()}
