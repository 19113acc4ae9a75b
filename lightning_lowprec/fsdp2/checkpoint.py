"""Save and load a sharded model and its optimizers, from and into any precision.

Single files hold whole tensors, folders hold shards. Both store a model under the names and in the dtypes of its state
dict, and optimizer state by the name (or position) of the parameter. If the weights are half precision, a float32
``master_param`` is stored beside the moments. Loaded into float32 weights, the masters become the weights. Loaded into
an optimizer that keeps masters, float32 weights become the masters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_lowprec.fsdp2 import atomic, optimizer_state
from lightning_lowprec.fsdp2.placement import place
from lightning_lowprec.fsdp2.sharded_checkpoint import ShardedCheckpoint
from lightning_lowprec.masters.optimizer import MASTER_PARAM, has_masters
from lightning_lowprec.msamp.weight import msamp_state_of
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.rounding import reconcile
from lightning_lowprec.private.torch import with_local_tensor

State = dict[str, Any]


def model_state(model: nn.Module, *, full: bool) -> State:
    """Return a model's state dict: whole tensors on rank 0 and nothing elsewhere, or DTensors on every rank."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=full, cpu_offload=True))


def save_file(path: Path, content: Any) -> None:
    """Write the ``content`` of rank 0 to a single file."""
    with atomic.replacing(path, folder=False) as file:
        if torch.distributed.get_rank() == 0:
            torch.save(content, file)


def save_folder(path: Path, shards: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Write a sharded checkpoint: every rank writes its ``shards``, rank 0 writes the ``rest``."""
    with atomic.replacing(path, folder=True) as new:
        save(dict(shards), checkpoint_id=new)
        if torch.distributed.get_rank() == 0:
            torch.save(dict(rest), new / atomic.META)


def locate(path: Path) -> Path:
    """Return where the checkpoint is that rank 0 calls ``path``; the result is the same on all ranks.

    If a run was killed while it replaced the checkpoint, the old checkpoint may be used; a log line says so.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the path is a folder without a sharded checkpoint.
    """

    def look() -> Path:
        found = atomic.find(path)
        if found.is_dir() and not atomic.is_checkpoint_folder(found):
            raise ValueError(
                f"{str(path)!r} is a folder without {atomic.META!r}, so it is no sharded checkpoint of Lightning or of"
                " this package. Give the folder of a sharded checkpoint, or the file of a full one."
            )
        return found

    found = atomic.on_rank_zero(look)
    if found != path:
        rank_zero_info(f"fsdp2: {str(path)!r} was not completed; loading the one before it, {str(found)!r}.")
    return found


def read_file(path: Path, weights_only: bool = True) -> Any:
    """Read a single file; its tensors are on the CPU, and read from disk when they are used."""
    return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)


def load_folder(
    path: Path,
    model: nn.Module,
    model_keys: Collection[str],
    optimizers: Mapping[str, Optimizer],
    *,
    strict: bool,
) -> None:
    """Load the shards of a folder, written by any number of ranks, into a sharded model and its optimizers.

    Args:
        path: the folder.
        model: sharded.
        model_keys: the keys under which the model may be stored; the first one that exists is used.
        optimizers: the optimizers by key.
        strict: raise if the model and the checkpoint do not have the same entries.

    Raises:
        KeyError: the model or an optimizer is not in the checkpoint, or entries are missing or unexpected.
        ValueError: the shapes or parameters belong to another model.
    """
    stored = ShardedCheckpoint(path)
    key = next((key for key in model_keys if key in stored.roots), None)
    if key is None:
        raise KeyError(_missing(path, next(iter(model_keys)), stored.roots))
    live = get_model_state_dict(model)
    values = stored.model(key, live)
    params = optimizer_state.named_parameters(model)
    states: dict[str, State] = {}
    for name, optimizer in optimizers.items():
        if name in stored.roots:
            states[name] = optimizer_state.by_fqn(stored.optimizer(name, params), model, optimizer, name)
        elif strict:
            raise KeyError(_missing(path, name, stored.roots))
    _apply(model, live, values, optimizers, states, strict)


def load_whole(
    model: nn.Module,
    values: Mapping[str, Any],
    optimizers: Mapping[str, Optimizer],
    stored: Mapping[str, Mapping[str, Any]],
    *,
    strict: bool,
) -> None:
    """Load whole tensors, which every rank has, into a sharded model and its optimizers.

    Args:
        model: sharded.
        values: the model's stored state dict, of any precision.
        optimizers: the optimizers by key.
        stored: the stored state dicts of optimizers by key; their parameters have names or numbers.
        strict: raise if the model and the checkpoint do not have the same entries.

    Raises:
        KeyError: entries are missing or unexpected.
        ValueError: the shapes or parameters belong to another model.
    """
    live = get_model_state_dict(model)
    params = optimizer_state.named_parameters(model)
    states: dict[str, State] = {}
    for name, state_dict in stored.items():
        found = optimizer_state.by_fqn(state_dict, model, optimizers[name], name)
        states[name] = {**found, "state": optimizer_state.placed(found["state"], params)}
    values = {optimizer_state.clean(fqn): value for fqn, value in values.items()}
    sharded = {fqn: _sharded(fqn, value, live.get(fqn)) for fqn, value in values.items()}
    _apply(model, live, sharded, optimizers, states, strict)


def _sharded(fqn: str, value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return value
    if value.shape != like.shape:
        raise ValueError(
            f"{fqn!r} has the shape {tuple(value.shape)} in the checkpoint, {tuple(like.shape)} in the model."
        )
    return place(value, like)


def _apply(
    model: nn.Module,
    live: State,
    values: State,
    optimizers: Mapping[str, Optimizer],
    states: Mapping[str, State],
    strict: bool,
) -> None:
    missing, unexpected = sorted(live.keys() - values.keys()), sorted(values.keys() - live.keys())
    if strict and (missing or unexpected):
        raise KeyError(
            f"{type(model).__name__} and the checkpoint differ. Missing in the checkpoint: {missing[:5]}, unexpected:"
            f" {unexpected[:5]}. Pass `strict=False` (in a LightningModule, `strict_loading = False`) to load the rest."
        )
    values = {fqn: value for fqn, value in values.items() if fqn in live}
    params = optimizer_state.named_parameters(model)
    for name, state_dict in states.items():
        _settle_masters(optimizers[name], state_dict, params, values)
    set_model_state_dict(model, values, options=StateDictOptions(strict=strict))
    for name, state_dict in states.items():
        optimizer_state.load(optimizers[name], state_dict)


def _settle_masters(optimizer: Optimizer, state_dict: State, params: Mapping[str, Tensor], values: State) -> None:
    """Turn masters into float32 weights, or float32 weights into masters; drop masters that have no place."""
    state = state_dict["state"]
    for fqn in [fqn for group in state_dict["param_groups"] for fqn in group["params"]]:
        has_master = has_masters(optimizer) and params[fqn].dtype in HALF_DTYPES
        master = state.get(fqn, {}).get(MASTER_PARAM)
        weight = values.get(fqn)
        if has_master and master is None and weight is not None and weight.dtype == torch.float32:
            state[fqn] = {**state.get(fqn, {}), MASTER_PARAM: weight.clone()}
        elif master is not None and not has_master and msamp_state_of(params[fqn]) is None:
            state[fqn] = {name: value for name, value in state[fqn].items() if name != MASTER_PARAM}
            if weight is not None and params[fqn].dtype == torch.float32:
                values[fqn] = _reconciled(master, weight)
        if fqn in state and not state[fqn]:
            del state[fqn]


def _reconciled(master: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype not in HALF_DTYPES:
        return weight
    if not isinstance(weight, DTensor) or not isinstance(master, DTensor):
        return reconcile(master, weight)
    local = reconcile(master.to_local(), weight.to_local())
    return with_local_tensor(local, weight)


def _missing(path: Path, key: str, roots: Collection[str]) -> str:
    return f"{str(path)!r} holds nothing under {key!r}; it holds: {', '.join(roots)}."
