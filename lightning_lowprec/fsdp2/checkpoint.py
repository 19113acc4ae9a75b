"""Save and load a sharded model and its optimizers, from and into any precision.

Single files hold whole tensors, folders hold shards. Both store a model under the names and in the dtypes of its state
dict, and optimizer state by the name (or position) of the parameter. If the weights are half precision, a float32
``master_param`` is stored beside the moments. Loaded into float32 weights, the masters become the weights. Loaded into
an optimizer that keeps masters, float32 weights become the masters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_lowprec.conversion import backends
from lightning_lowprec.fsdp2 import atomic, folder, optimizer_state, torch_file
from lightning_lowprec.fsdp2.stored_checkpoint import StoredCheckpoint
from lightning_lowprec.masters.coded_state import MASTER_REMAINDER, decoded_entry, joined
from lightning_lowprec.masters.optimizer import MASTER_PARAM, has_masters
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.rounding import reconcile
from lightning_lowprec.private.torch import local_tensor, with_local_tensor

State = dict[str, Any]


def model_state(model: nn.Module, *, full: bool) -> State:
    """Return a model's state dict: whole tensors on rank 0 and nothing elsewhere, or DTensors on every rank."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=full, cpu_offload=True))


def save(path: Path, shards: Mapping[str, Any], rest: Mapping[str, Any], *, full: bool) -> None:
    """Write ``shards`` (models and optimizers by key) and ``rest``: a file on rank 0, or a folder on all ranks."""
    with atomic.replacing(path, folder=not full) as new:
        if not full:
            folder.write(new, shards, rest)
        elif torch.distributed.get_rank() == 0:
            torch_file.write({**shards, **rest}, new, checked=False)  # torch writes checksums of its own


def load(
    stored: StoredCheckpoint, model: nn.Module, key: str, optimizers: Mapping[str, Optimizer], *, strict: bool
) -> None:
    """Load a sharded model, and optimizers by key, from a checkpoint that was written by any number of ranks."""
    live = get_model_state_dict(model)
    values = stored.model(key, live)
    states = {name: stored.optimizer(name, model, optimizer) for name, optimizer in optimizers.items()}
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


def check_storage_options(value: Any) -> None:
    """Raise TypeError if the user gave storage options."""
    if value is not None:
        raise TypeError(
            f"`storage_options={value!r}` is not valid with 'fsdp2', which writes checkpoints by itself and not through"
            " a CheckpointIO; leave it out."
        )


def _settle_masters(optimizer: Optimizer, state_dict: State, params: Mapping[str, Tensor], values: State) -> None:
    """Turn masters into float32 weights, or float32 weights into masters; drop masters that have no place."""
    state = state_dict["state"]
    for fqn in [fqn for group in state_dict["param_groups"] for fqn in group["params"]]:
        has_master = has_masters(optimizer) and params[fqn].dtype in HALF_DTYPES
        if fqn in state and not has_master:
            state[fqn] = _decoded(state[fqn], params[fqn], values.get(fqn))
        master = state.get(fqn, {}).get(MASTER_PARAM)
        weight = values.get(fqn)
        if has_master and master is None and weight is not None and weight.dtype == torch.float32:
            state[fqn] = {**state.get(fqn, {}), MASTER_PARAM: weight.clone()}
        elif master is not None and not has_master and not backends.keeps_master(params[fqn]):
            state[fqn] = {name: value for name, value in state[fqn].items() if name != MASTER_PARAM}
            if weight is not None and params[fqn].dtype == torch.float32:
                values[fqn] = _reconciled(master, weight)
        if fqn in state and not state[fqn]:
            del state[fqn]


def _decoded(entry: State, param: Tensor, weight: Tensor | None) -> State:
    """Return state of 8 bits as float32 values, and a remainder as the float32 master."""
    entry = decoded_entry(entry, param)
    remainder = entry.pop(MASTER_REMAINDER, None)
    if remainder is not None and weight is not None:
        master = joined(weight, remainder)
        entry[MASTER_PARAM] = with_local_tensor(master, weight) if isinstance(weight, DTensor) else master
    return entry


def _reconciled(master: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype not in HALF_DTYPES:
        return weight
    local = reconcile(local_tensor(master), local_tensor(weight))
    return with_local_tensor(local, weight) if isinstance(weight, DTensor) else local
