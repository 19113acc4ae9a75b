"""Split what Lightning saves and loads into the model, optimizers and the rest, for Fabric and for the Trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from torch.nn import Module
from torch.optim import Optimizer

from lightning_lowprec.fsdp2 import checkpoint, optimizer_state
from lightning_lowprec.fsdp2.shard import is_sharded
from lightning_lowprec.fsdp2.stored_checkpoint import StoredFile, StoredFolder, open_checkpoint

State = dict[str, Any]
Filter = Mapping[str, Callable[[str, Any], bool]]
MODEL_KEYS: Final = ("state_dict", "model")
"""The keys under which the Trainer's ModelParallelStrategy and FSDPStrategy store the model in a folder."""


# ---- Fabric


def save_state(path: Path, state: Mapping[str, Any], *, full: bool, filter: Filter | None) -> None:
    """Save the ``state`` of a Fabric user: one sharded model, its optimizers, and anything else."""
    _, model = one_model(state, "save")
    shards: State = {}
    rest: State = {}
    for key, value in state.items():
        if isinstance(value, Module):
            shards[key] = checkpoint.model_state(value, full=full)
        elif isinstance(value, Optimizer):
            shards[key] = optimizer_state.collect(model, value, full=full)
        else:
            rest[key] = value.state_dict() if _stateful(value) else value
    for key, keep in (filter or {}).items():
        for part in (shards, rest):
            if isinstance(part.get(key), Mapping):
                part[key] = {name: value for name, value in part[key].items() if keep(name, value)}
    checkpoint.save(path, shards, rest, full=full)


def load_state(path: Path, state: State, *, strict: bool, weights_only: bool) -> State:
    """Load the entries of ``state`` in place, and return the rest of the checkpoint."""
    key, model = one_model(state, "load")
    stored = open_checkpoint(path, weights_only)
    _check_keys(path, state if strict else [key], stored.keys)
    optimizers = {k: value for k, value in state.items() if isinstance(value, Optimizer) and k in stored.keys}
    checkpoint.load(stored, model, key, optimizers, strict=strict)
    for name in [name for name in state if name in stored.rest]:
        value = stored.rest.pop(name)
        if hasattr(state[name], "load_state_dict"):
            state[name].load_state_dict(value)
        else:
            state[name] = value
    return stored.rest


def load_raw(path: Path, model: Module, *, strict: bool) -> None:
    """Load a file that holds a state dict and nothing else."""
    stored = open_checkpoint(path, weights_only=True)
    if isinstance(stored, StoredFolder):
        raise ValueError(f"{str(path)!r} is a folder; `fabric.load_raw` loads the file of a full state dict.")
    checkpoint.load(StoredFile({"model": stored.rest}), model, "model", {}, strict=strict)


def one_model(state: Mapping[str, Any], verb: str) -> tuple[str, Module]:
    """Return the sharded model in a Fabric state, with its key.

    Raises:
        ValueError: the state has no sharded model, or several.
    """
    models = {key: value for key, value in state.items() if isinstance(value, Module) and is_sharded(value)}
    if len(models) == 1:
        return next(iter(models.items()))
    found = f"{len(models)} sharded models ({', '.join(models)})" if models else "no sharded model"
    raise ValueError(
        f"fabric.{verb}: found {found} in the state, expected one. Set the model up first (`fabric.setup`) and pass it,"
        " with its optimizers, as `{'model': model, ...}`; several models go into several checkpoints."
    )


# ---- Trainer


def save_trainer(path: Path, dumped: State, *, full: bool) -> None:
    """Save the checkpoint that the Trainer has collected, in Lightning's layout."""
    shards: State = {}
    if not full:
        shards = {"state_dict": dumped.pop("state_dict")}
        shards |= {f"optimizer_{i}": state for i, state in enumerate(dumped.pop("optimizer_states", []))}
    checkpoint.save(path, shards, dumped, full=full)


def load_trainer(path: Path, model: Module, optimizers: list[Optimizer], *, strict: bool, weights_only: bool) -> State:
    """Load model and optimizers from a checkpoint of the Trainer, and return the rest."""
    stored = open_checkpoint(path, weights_only)
    states = stored.rest.pop("optimizer_states", None) or []  # in a file
    if optimizers:
        stored.rest.update({f"optimizer_{i}": state for i, state in enumerate(states)})
    saved = [key for key in stored.keys if re.fullmatch(r"optimizer_\d+", key)]
    if optimizers and not saved:
        raise KeyError(
            f"{str(path)!r} holds the model alone (`save_weights_only=True`?), and the Trainer was asked to resume from"
            " it. Load the weights in your own code, or resume from a checkpoint with optimizer states."
        )
    if optimizers and len(saved) != len(optimizers):
        raise ValueError(f"{str(path)!r} has the state of {len(saved)} optimizers, the model has {len(optimizers)}.")
    key = next((key for key in MODEL_KEYS if key in stored.keys), MODEL_KEYS[0])
    _check_keys(path, [key], stored.keys)
    named = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
    checkpoint.load(stored, model, key, named, strict=strict)
    return stored.rest


def check_storage_options(value: Any) -> None:
    """Raise TypeError if the user gave storage options."""
    if value is not None:
        raise TypeError(
            f"`storage_options={value!r}` is not valid with 'fsdp2', which writes checkpoints by itself and not through"
            " a CheckpointIO; leave it out."
        )


def _stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _check_keys(path: Path, wanted: Collection[str], have: Collection[str]) -> None:
    missing = sorted(set(wanted) - set(have))
    if missing:
        raise KeyError(
            f"{str(path)!r} holds nothing under {', '.join(map(repr, missing))}; it holds: {', '.join(have)}. Ask for"
            " less, or pass `strict=False`."
        )
