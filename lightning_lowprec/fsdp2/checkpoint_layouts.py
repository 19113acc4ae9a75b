"""Split what Lightning saves and loads into the model, optimizers and the rest, for Fabric and for the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from torch.nn import Module
from torch.optim import Optimizer

from lightning_lowprec.fsdp2 import atomic, checkpoint, optimizer_state
from lightning_lowprec.fsdp2.shard import is_sharded

State = dict[str, Any]
Filter = Mapping[str, Callable[[str, Any], bool]]
MODEL_KEYS: Final = ("state_dict", "model")
"""The keys under which the Trainer's ModelParallelStrategy and FSDPStrategy store the model in a folder."""


# ---- Fabric


def save_state(path: Path, state: Mapping[str, Any], *, full: bool, filter: Filter | None) -> None:
    """Save the ``state`` of a Fabric user: one sharded model, its optimizers, and anything else.

    Raises:
        ValueError: ``state`` has no sharded model, or several.
    """
    _, model = one_model(state, "save")
    filter = filter or {}
    shards: State = {}
    rest: State = {}
    for key, value in state.items():
        if isinstance(value, Module):
            shards[key] = _filtered(checkpoint.model_state(value, full=full), filter.get(key))
        elif isinstance(value, Optimizer):
            shards[key] = _filtered(optimizer_state.collect(model, value, full=full), filter.get(key))
        else:
            converted = value.state_dict() if _stateful(value) else value
            rest[key] = _filtered(converted, filter.get(key)) if isinstance(converted, Mapping) else converted
    if full:
        checkpoint.save_file(path, {**shards, **rest})
    else:
        checkpoint.save_folder(path, shards, rest)


def load_state(path: Path, state: State, *, strict: bool, weights_only: bool) -> State:
    """Load the entries of ``state`` in place, and return the rest of the checkpoint.

    Raises:
        KeyError: the checkpoint lacks an entry of ``state``, with ``strict=True``.
        ValueError: ``state`` has no sharded model, or several; or the checkpoint belongs to another model.
    """
    key, model = one_model(state, "load")
    optimizers = {name: value for name, value in state.items() if isinstance(value, Optimizer)}
    if path.is_dir():
        rest = checkpoint.read_file(path / atomic.META, weights_only)
        _check_keys(state.keys() - optimizers.keys() - {key}, rest, strict)
        checkpoint.load_folder(path, model, (key,), optimizers, strict=strict)
    else:
        rest = checkpoint.read_file(path, weights_only)
        _check_keys(state.keys() if strict else {key}, rest, strict=True)
        stored = {name: rest.pop(name) for name in optimizers if name in rest}
        checkpoint.load_whole(model, rest.pop(key), optimizers, stored, strict=strict)
    for name in state.keys() - optimizers.keys() - {key}:
        if name not in rest:
            continue
        value = rest.pop(name)
        if hasattr(state[name], "load_state_dict"):
            state[name].load_state_dict(value)
        else:
            state[name] = value
    return dict(rest)


def load_raw(path: Path, model: Module, *, strict: bool) -> None:
    """Load a file that holds a state dict and nothing else.

    Raises:
        ValueError: ``path`` is a folder.
    """
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; `fabric.load_raw` loads the file of a full state dict.")
    checkpoint.load_whole(model, checkpoint.read_file(path), {}, {}, strict=strict)


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
    if full:
        checkpoint.save_file(path, dumped)
        return
    shards = {"state_dict": dumped.pop("state_dict")}
    shards |= {f"optimizer_{i}": state for i, state in enumerate(dumped.pop("optimizer_states", []))}
    checkpoint.save_folder(path, shards, dumped)


def load_trainer(path: Path, model: Module, optimizers: list[Optimizer], *, strict: bool, weights_only: bool) -> State:
    """Load model and optimizers from a checkpoint of the Trainer, and return the rest.

    Raises:
        KeyError: the checkpoint lacks something that the Trainer restores.
        ValueError: the checkpoint belongs to another model, or has other optimizers.
    """
    if path.is_dir():
        rest: State = checkpoint.read_file(path / atomic.META, weights_only)
        named = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
        checkpoint.load_folder(path, model, MODEL_KEYS, named, strict=strict)
        return rest
    rest = checkpoint.read_file(path, weights_only)
    if "state_dict" not in rest:
        raise KeyError(f"{str(path)!r} holds no 'state_dict', so it is no checkpoint of the Trainer.")
    stored = rest.pop("optimizer_states", None)
    if optimizers and stored is None:
        raise KeyError(
            f"{str(path)!r} holds the model alone (`save_weights_only=True`?), and the Trainer was asked to resume from"
            " it. Load the weights in your own code, or resume from a checkpoint with optimizer states."
        )
    if optimizers and len(stored) != len(optimizers):
        raise ValueError(f"{str(path)!r} has the state of {len(stored)} optimizers, the model has {len(optimizers)}.")
    numbered = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)}
    states = dict(zip(numbered, stored or [], strict=False)) if optimizers else {}
    checkpoint.load_whole(model, rest.pop("state_dict"), numbered, states, strict=strict)
    return rest


def check_storage_options(value: Any) -> None:
    """Raise TypeError if the user gave storage options."""
    if value is not None:
        raise TypeError(
            f"`storage_options={value!r}` is not valid with 'fsdp2', which writes checkpoints by itself and not through"
            " a CheckpointIO; leave it out."
        )


def _stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _filtered(values: Any, keep: Callable[[str, Any], bool] | None) -> Any:
    return values if keep is None else {key: value for key, value in values.items() if keep(key, value)}


def _check_keys(wanted: Any, have: Mapping[str, Any], strict: bool) -> None:
    missing = sorted(set(wanted) - have.keys())
    if strict and missing:
        raise KeyError(
            f"The checkpoint holds nothing under {', '.join(map(repr, missing))}; it holds:"
            f" {', '.join(map(str, have))}. Ask for less, or pass `strict=False`."
        )
