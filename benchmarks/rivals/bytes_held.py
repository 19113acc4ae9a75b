"""Bytes that a training step holds in memory: weights, gradients, moments and masters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_lowprec.masters.moments import MASTER_PARAM


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes by address of every storage that these tensors hold; subclasses are taken apart."""
    found: dict[int, int] = {}
    for tensor in tensors:
        for plain in _plain(tensor):
            storage = plain.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _plain(tensor: Any) -> Iterator[Tensor]:
    if not isinstance(tensor, Tensor) or tensor.is_meta:
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            if not name.startswith("master"):  # MS-AMP's masters are counted by `masters`
                yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def weights(model: nn.Module) -> int:
    return sum(storages(model.parameters()).values())


def gradients(model: nn.Module) -> int:
    return sum(storages(p.grad for p in model.parameters() if p.grad is not None).values())


def moments(optimizer: Any) -> int:
    """What is a tensor in the optimizer's state and no master; Fabric's wrapper shows the same state."""
    return sum(storages(value for name, value in _state(optimizer) if name != MASTER_PARAM).values())


def masters(optimizer: Any, model: nn.Module) -> int:
    """Masters in the optimizer's state, beside it (ours), and beside the weights (MS-AMP's), found by attributes."""
    inner = getattr(optimizer, "optimizer", optimizer)
    known = storages(model.parameters()) | storages(p.grad for p in model.parameters() if p.grad is not None)
    known |= storages(value for name, value in _state(optimizer) if name != MASTER_PARAM)
    found = storages(_reachable(vars(inner), depth=12, seen=set()))
    found |= storages(value for name, value in _state(optimizer) if name == MASTER_PARAM)
    for p in model.parameters():
        found |= storages(_reachable(vars(p), depth=12, seen=set()))
    return sum(size for address, size in found.items() if address not in known)


def _state(optimizer: Any) -> Iterator[tuple[str, Any]]:
    for state in optimizer.state.values():
        yield from state.items()


def _reachable(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in [*value.keys(), *value.values()]:
            yield from _reachable(inner, depth - 1, seen)
    elif isinstance(value, (list, tuple, set)):
        for inner in value:
            yield from _reachable(inner, depth - 1, seen)
    elif type(value).__module__.startswith("lightning_lowprec"):
        yield from _reachable(getattr(value, "__dict__", {}), depth - 1, seen)
