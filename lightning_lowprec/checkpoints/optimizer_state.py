"""Collect and load the state of an optimizer by the names of its parameters, without a step.

torch's functions for this initialise empty state by a step with zero gradients and a learning rate of zero. That step
has effects: on stochastic rounding, on schedulers and hooks, and with optimizers that ignore the learning rate.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from lightning_lowprec.masters.moments import EXPONENTS
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.private.torch import local_tensor, tree_map_only, with_local_tensor

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
StateDict = dict[str, Any]
_SENT_AS: Final = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.int16: torch.float16}
"""By dtype that gloo does not gather: the dtype as which its bits are gathered."""
_QUANTISED: Final = ("8bit", "4bit", "Fp8")
"""How the names of torchao's optimizers end that keep their state as codes."""


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by the fqn that they have in checkpoints, without the names of wrapping modules."""
    return {clean(fqn): p for fqn, p in model.named_parameters()}


def clean(fqn: str) -> str:
    """Return a name without the names of wrapping modules."""
    for wrapper in _WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def collect(model: nn.Module, optimizer: Optimizer, *, full: bool) -> StateDict:
    """Return ``{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn]}]}``.

    The tensors are DTensors; if ``full``, they are whole, on the CPU of rank 0, and other ranks get an empty dict.
    Lightning's stand-in for no optimizer, whose state dict is empty, has no groups.
    """
    state_dict = optimizer.state_dict() or {"state": {}, "param_groups": []}
    fqns = _fqns(model, optimizer)
    fqn_of = _by_number(state_dict["param_groups"], fqns)
    groups = [{**group, "params": names} for group, names in zip(state_dict["param_groups"], fqns, strict=True)]
    state = {
        fqn_of[key]: {name: tree_map_only(Tensor, _unwrapped, v) for name, v in entry.items()}
        for key, entry in state_dict["state"].items()
    }
    if not full:
        return {"state": state, "param_groups": groups}
    on_rank_zero = torch.distributed.get_rank() == 0
    gathered: StateDict = {}
    for fqn, entry in state.items():
        values = {name: tree_map_only(Tensor, whole, value) for name, value in entry.items()}
        if on_rank_zero:  # other ranks free each value at once
            gathered[fqn] = values
    return {"state": gathered, "param_groups": tree_map_only(Tensor, whole, groups)} if on_rank_zero else {}


def numbered(state_dict: StateDict, model: nn.Module) -> StateDict:
    """Replace fqns by the parameters' positions in the model, as the Trainer writes single files."""
    if not state_dict:
        return state_dict
    number = {fqn: i for i, fqn in enumerate(named_parameters(model))}
    groups = [{**group, "params": [number[fqn] for fqn in group["params"]]} for group in state_dict["param_groups"]]
    return {"state": {number[fqn]: entry for fqn, entry in state_dict["state"].items()}, "param_groups": groups}


def by_fqn(stored: Mapping[str, Any], model: nn.Module, optimizer: Optimizer, key: str) -> StateDict:
    """Return a stored state dict by fqn, with the parameter groups that ``optimizer`` has now.

    Stored parameters have names, or numbers that count along the groups.
    """
    fqns = _fqns(model, optimizer)
    groups = stored["param_groups"]
    if not all(isinstance(name, str) for group in groups for name in group["params"]):
        if [len(group["params"]) for group in groups] != [len(group) for group in fqns]:
            raise ValueError(
                f"{key!r} of the checkpoint has groups of {[len(g['params']) for g in groups]} parameters, and the"
                f" optimizer has groups of {[len(g) for g in fqns]}. Build it as it was when the checkpoint was saved."
            )
        fqn_of = _by_number(groups, fqns)
        state = {fqn_of[number]: entry for number, entry in stored["state"].items()}
        return {"state": state, "param_groups": [{**g, "params": f} for g, f in zip(groups, fqns, strict=True)]}
    group_of = {clean(fqn): group for group in groups for fqn in group["params"]}
    updated = {fqn for group in fqns for fqn in group}
    if updated != group_of.keys():
        only_here, only_there = sorted(updated - group_of.keys()), sorted(group_of.keys() - updated)
        raise ValueError(
            f"{key!r} of the checkpoint does not hold the parameters of the optimizer: only in the checkpoint:"
            f" {only_there[:3]}, only in the optimizer: {only_here[:3]}. Build it as it was when the checkpoint was"
            " saved, or load the model alone."
        )
    regrouped = []
    for names in fqns:
        sources = {id(group_of[fqn]): group_of[fqn] for fqn in names}
        if len(sources) > 1:
            raise ValueError(
                f"the parameters of one group of the optimizer ({names[0]!r}, ...) are in {len(sources)} groups of"
                f" {key!r} in the checkpoint. Build it as it was when the checkpoint was saved."
            )
        regrouped.append({**next(iter(sources.values()), {}), "params": names})
    by_name = {clean(fqn): entry for fqn, entry in stored["state"].items()}
    return {"state": {fqn: entry for fqn, entry in by_name.items() if fqn in updated}, "param_groups": regrouped}


def placed(state: Mapping[str, Mapping[str, object]], params: Mapping[str, Tensor]) -> StateDict:
    """Shard whole state tensors like their parameters."""

    def placed_like(name: str, like: Tensor, tensor: Tensor) -> Tensor:
        placements = placements_of(name, tensor.shape, like)
        return tensor.detach().clone() if placements is None else place(tensor, like, placements)

    return {
        fqn: {name: tree_map_only(Tensor, partial(placed_like, name, params[fqn]), v) for name, v in entry.items()}
        for fqn, entry in state.items()
    }


def load(optimizer: Optimizer, state_dict: StateDict) -> None:
    """Load the result of :func:`by_fqn`, after its state was sharded like the parameters."""
    fqns = [fqn for group in state_dict["param_groups"] for fqn in group["params"]]
    numbers = {fqn: i for i, fqn in enumerate(fqns)}
    groups = [
        {**old, **_rates_like(old, new), "params": [numbers[fqn] for fqn in new["params"]]}
        for old, new in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    optimizer.load_state_dict(
        {"state": {numbers[fqn]: entry for fqn, entry in state_dict["state"].items()}, "param_groups": groups}
    )


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer of torchao that cannot train the shards of FSDP2, or be saved with them."""
    kinds = [cls.__name__ for cls in type(optimizer).__mro__ if cls.__module__.startswith("torchao.optim")]
    reason = None
    if any(name.endswith(_QUANTISED) for name in kinds):
        reason = "whose checkpoints cannot cut its codes"
    elif "CPUOffloadOptimizer" in kinds and any(
        param.dtype in HALF_DTYPES for group in optimizer.param_groups for param in group["params"]
    ):
        reason = "where it does not update half-precision weights"
    if reason:
        raise ValueError(
            f"`{type(optimizer).__name__}` of torchao does not run under 'fsdp2', {reason}. Use AdamW of torch with"
            " `precision='bf16-8bit'` or `precision='fp8-hybrid-8bit'`, whose moments have 8 bits."
        )


def _rates_like(old: Mapping[str, Any], new: Mapping[str, Any]) -> StateDict:
    """Return hyperparameters as tensors where the optimizer has tensors (torchao's learning rate), else as numbers."""
    values = dict(new)
    for name, value in new.items():
        if isinstance(old.get(name), Tensor) and isinstance(value, (int, float)):
            values[name] = torch.full_like(old[name], value)
        elif isinstance(old.get(name), float) and isinstance(value, Tensor):
            values[name] = value.item()
    return values


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the one tensor that a tensor class has inside, such as the class whose weights FSDP2 gathers in FP8."""
    local: Any = local_tensor(tensor)
    inner: Sequence[str] = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else ()
    if len(inner) != 1:
        return tensor
    return with_local_tensor(getattr(local, inner[0]), tensor)


def _by_number(groups: list[StateDict], fqns: list[list[str]]) -> dict[object, str]:
    numbers = [number for group in groups for number in group["params"]]
    return dict(zip(numbers, (fqn for group in fqns for fqn in group), strict=True))


def _fqns(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    names = {id(p): fqn for fqn, p in named_parameters(model).items()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in names:
                raise ValueError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(p.shape)} that is none of"
                    f" {type(model).__name__}, so a checkpoint cannot name it. Save one model with its optimizers."
                )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


# ---- whole tensors as the shards of this rank, and back


def placements_of(name: str, shape: Sequence[int], like: Tensor) -> Sequence[Placement] | None:
    """Return how the state ``name`` of a parameter ``like`` is sharded; None: it is whole on every rank, as a counter.

    The exponents of coded state, (rows, blocks per row), are sharded as the parameter is; other tensors in the
    dimensions that both have with the same size. Row factors, (out, 1) in Adafactor or (out,), are sharded as the rows
    of the weight are; column factors, (1, in) or (in,), are DTensors that are whole on every rank. A vector of a square
    weight counts as one of rows.
    """
    if not isinstance(like, DTensor):
        return None
    if name.endswith(EXPONENTS):
        return like.placements
    if not shape or (len(shape) != like.ndim and shape not in (like.shape[: len(shape)], like.shape[-len(shape) :])):
        return None
    return [
        Replicate() if isinstance(p, Shard) and shape[p.dim : p.dim + 1] != like.shape[p.dim : p.dim + 1] else p
        for p in like.placements
    ]


@torch.no_grad()
def place(whole: Tensor, like: Tensor, placements: Sequence[Placement] | None = None) -> Tensor:
    """Return this rank's part of ``whole``, placed as ``like`` is, in new memory and in the dtype of ``whole``."""
    if not isinstance(like, DTensor):
        return whole.detach().to(like.device, copy=True)
    if whole.dtype in _SENT_AS:
        return _viewed(place(whole.view(_SENT_AS[whole.dtype]), like, placements), whole.dtype)
    on_device = whole.detach().to(like.device_mesh.device_type)
    placed = distribute_tensor(on_device, like.device_mesh, placements or like.placements, src_data_rank=None)
    return placed.to(like.device).clone()


def empty(
    shape: Sequence[int], dtype: torch.dtype, like: Tensor | None, placements: Sequence[Placement] | None
) -> Tensor:
    """Return a tensor to be filled: a DTensor if there are placements for it, else a whole tensor on every rank."""
    if placements is None or not isinstance(like, DTensor):
        return torch.empty(tuple(shape), dtype=dtype)
    sharded = torch.distributed.tensor.empty(*shape, dtype=dtype, device_mesh=like.device_mesh, placements=placements)
    return sharded.to(like.device)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return a tensor whole on the CPU, by a collective if it is sharded."""
    if tensor.dtype in _SENT_AS and isinstance(tensor, DTensor):
        return whole(_viewed(tensor, _SENT_AS[tensor.dtype])).view(tensor.dtype)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return with_local_tensor(local_tensor(tensor).view(dtype), tensor)
