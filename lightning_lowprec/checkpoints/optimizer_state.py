"""Collect and load the state of an optimizer by the names of its parameters, without a step.

torch's functions for this initialise empty state by a step with zero gradients and a learning rate of zero. That step
has effects: on stochastic rounding, on schedulers and hooks, and with optimizers that ignore the learning rate.

The quantised state of torchao (AdamW8bit, AdamW4bit, AdamWFp8) is stored as plain tensors, bit for bit: codes, and one
scale per block of consecutive elements. If it is sharded by rows, the codes and scales of all ranks follow each other
in the whole tensor, so they are stored as tensors that are sharded by their first dimension. If the shards of another
number of ranks would cut a block, the state is loaded dequantised. torchao quantises a local shard that has at least
4096 elements and whole blocks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from lightning_lowprec.masters.moments import EXPONENTS
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.private.torch import (
    disable_autograd_cache,
    dtensor,
    local_tensor,
    tree_map_only,
    with_local_tensor,
)

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
StateDict = dict[str, Any]
_SENT_AS: Final = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.int16: torch.float16}
"""By dtype that gloo does not gather: the dtype as which its bits are gathered."""
CLASS: Final = "lowbit_class"
_CLASSES: Final = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}


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
        fqn_of[key]: {name: packed(tree_map_only(Tensor, _unwrapped, v)) for name, v in entry.items()}
        for key, entry in state_dict["state"].items()
    }
    if not full:
        return {"state": state, "param_groups": groups}
    on_rank_zero = torch.distributed.get_rank() == 0
    gathered: StateDict = {}
    for fqn, entry in state.items():
        values = {name: _gathered(value) for name, value in entry.items()}
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

    The stored parameters have names or numbers. Numbers count along the groups, as everywhere in torch.
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


def placed(state: Mapping[str, Any], params: Mapping[str, Tensor]) -> StateDict:
    """Shard whole state tensors like their parameters, quantised state too."""

    def placed_like(name: str, value: Any, like: Tensor) -> Any:
        def one(tensor: Tensor) -> Tensor:
            placements = placements_of(name, tensor.shape, like)
            return tensor.detach().clone() if placements is None else place(tensor, like, placements)

        return unpacked(packed(value), like, one)

    return {
        fqn: {name: placed_like(name, value, params[fqn]) for name, value in entry.items()}
        for fqn, entry in state.items()
    }


def unpacked(value: Any, like: Tensor, one: Callable[[Tensor], Tensor] = lambda t: t) -> Any:
    """Return quantised state built again, or any other ``value`` with ``one`` applied to every tensor in it."""
    if isinstance(value, Mapping) and CLASS in value:
        return _unpack(value, like)
    return tree_map_only(Tensor, one, value)


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


def _gathered(value: Any) -> Any:
    gathered = tree_map_only(Tensor, whole, value)
    if isinstance(gathered, Mapping) and CLASS in gathered:
        return _unpack(gathered, gathered["codes"])  # torchao's optimizers can load this class
    return gathered


def _by_number(groups: list[Any], fqns: list[list[str]]) -> dict[Any, str]:
    """Return the fqn of every number in stored parameter groups."""
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
    dimensions that both have with the same size. Adafactor's row factors (out, 1) are sharded as the rows of the weight
    are; its column factors (1, in) are whole on every rank.
    """
    if not isinstance(like, DTensor):
        return None
    if name.endswith(EXPONENTS):
        return like.placements
    if len(shape) == 0 or len(shape) != like.ndim:
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
    """Return the bytes of a tensor as another dtype of the same size."""
    return with_local_tensor(local_tensor(tensor).view(dtype), tensor)


# ---- torchao's quantised state


def check_optimizer(optimizer: Optimizer) -> None:
    """Check an optimizer of sharded parameters before its first step; only torchao's optimizers can be refused."""
    cls = next((c for c in type(optimizer).__mro__ if c.__module__.startswith("torchao.optim")), None)
    if cls is None:
        return
    # torch's cache looks at the outside of a DTensor only, and would run a kernel on shards of another format
    # (pytorch#188390)
    disable_autograd_cache()
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    half = dtypes.intersection(HALF_DTYPES)
    if half and not cls.__name__.startswith("_"):  # its plain AdamW
        raise ValueError(
            f"`{type(optimizer).__name__}` of torchao does not update sharded {half.pop()} parameters. Use a"
            " precision with float32 weights ('bf16-mixed', 'bf16-master', 'fp8-hybrid'), or another optimizer."
        )


def packed(value: Any) -> Any:
    """Return quantised state as a dict of plain tensors (or DTensors, sharded by rows) and attributes; else ``value``.

    Shards that do not follow each other in the whole tensor are dequantised.
    """
    local: Any = local_tensor(value)
    if type(local).__name__ not in _CLASSES or not type(local).__module__.startswith("torchao."):
        return value
    rows = _rows_of(value) if isinstance(value, DTensor) else (0, 1)
    if rows is None:
        return with_local_tensor(local.dequantize(), value)
    names, _ = local.__tensor_flatten__()
    parts: dict[str, Any] = {CLASS: type(local).__name__, "shape": list(value.shape)}
    if hasattr(local, "signed"):
        parts["signed"] = local.signed
    for name in names:
        inner = getattr(local, name)
        inner = inner.view(torch.uint8) if name == "codes" else inner  # gloo gathers no float8
        if name != "qmap" and isinstance(value, DTensor):  # the rows of all ranks follow each other
            shape = [inner.shape[0] * rows[1], *inner.shape[1:]]
            inner = dtensor(inner, value.device_mesh, value.placements, shape, inner.stride())
        parts[name] = inner
    return parts


def _unpack(parts: Mapping[str, Any], like: Tensor) -> Tensor:
    """Undo :func:`packed` for a parameter ``like``: quantised if the shards have whole blocks, else dequantised."""
    shape = torch.Size(parts["shape"])
    codes, scale = parts["codes"], parts["scale"]
    if not isinstance(like, DTensor):
        return _build(parts, shape, lambda t: t.detach().to(like.device, copy=True))
    if isinstance(codes, DTensor):
        return with_local_tensor(_build(parts, like.to_local().shape, lambda t: local_tensor(t).to(like.device)), like)
    if not keeps_blocks(shape.numel() // scale.numel(), like):
        return place(_build(parts, shape, torch.clone).dequantize(), like)
    rank, ranks = _rows_of(like) or (0, 1)

    def part(tensor: Tensor) -> Tensor:
        return (tensor if tensor is parts.get("qmap") else tensor.chunk(ranks)[rank]).to(like.device, copy=True)

    return with_local_tensor(_build(parts, like.to_local().shape, part), like)


def keeps_blocks(block_size: int, like: Tensor) -> bool:
    """Return whether the shards of a parameter are equal in size and consist of whole blocks."""
    return isinstance(like, DTensor) and _rows_of(like) is not None and like.to_local().numel() % block_size == 0


def _build(parts: Mapping[str, Any], shape: torch.Size, part: Callable[[Tensor], Tensor]) -> Tensor:
    cls = getattr(importlib.import_module(_CLASSES[parts[CLASS]]), parts[CLASS])  # torchao takes seconds to import
    inner = {name: part(parts[name]) for name in cls.tensor_attrs}
    if parts[CLASS] == "OptimStateFp8":
        inner["codes"] = inner["codes"].view(torch.float8_e4m3fn)
    attributes = [parts["signed"]] if "signed" in parts else []
    attributes += [shape] if parts[CLASS] == "OptimState4bit" else []
    built: Tensor = cls(*inner.values(), *attributes)  # looks like float32, as in all versions of torchao
    return built


def _rows_of(value: DTensor) -> tuple[int, int] | None:
    """Return which part of the rows is here, of how many equal parts; None if it is not sharded so."""
    sharded = [(dim, p) for dim, p in enumerate(value.placements) if not isinstance(p, Replicate)]
    if not sharded:
        return 0, 1
    (dim, placement), *more = sharded
    ranks = value.device_mesh.size(dim)
    if more or type(placement) is not Shard or placement.dim > 0 or value.shape[0] % ranks:
        return None
    return value.device_mesh.get_local_rank(dim), ranks
