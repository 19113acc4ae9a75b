"""Optimizers built before their model was sharded follow the parameters that took the place of theirs.

``fully_shard`` replaces every parameter by a DTensor of its own. An optimizer built earlier would go on updating
tensors that no model has: nothing fails, and nothing trains.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class ReplacedParameters:
    """Which parameter of ``model`` took the place of which: made before the change, :meth:`record` called after it."""

    def __init__(self, model: nn.Module) -> None:
        self._model: nn.Module | None = model
        # weakly: nothing here may keep the unsharded weights alive; a dead one's id may belong to another by now
        self._old = {fqn: weakref.ref(p) for fqn, p in model.named_parameters(remove_duplicate=False)}
        self._ids = {fqn: id(p) for fqn, p in model.named_parameters(remove_duplicate=False)}
        self._new: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def record(self) -> None:
        """The change is over.

        Raises:
            RuntimeError: it renamed a parameter, so that nobody can say which replaced which.
        """
        assert self._model is not None, "called once"
        new = dict(self._model.named_parameters(remove_duplicate=False))
        lost = self._old.keys() - new.keys()
        if lost:
            raise RuntimeError(
                f"sharding renamed or removed parameters of {type(self._model).__name__}"
                f" ({', '.join(sorted(lost)[:3])}); optimizers and checkpoints could not find them again."
            )
        self._new = {self._ids[fqn]: (old, new[fqn]) for fqn, old in self._old.items()}
        self._model = None

    def put_into(self, optimizer: Optimizer) -> int:
        """Let the optimizer update the new parameters, with its state; returns how many it had of the old."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        known = [(p, *self._new[id(p)]) for p in held if id(p) in self._new]
        return follow(optimizer, {id(p): new for p, old, new in known if old() is p})


def follow(optimizer: Optimizer, new_of: dict[int, nn.Parameter]) -> int:
    """Put ``new_of[id(parameter)]`` in the place of parameters, in groups and state; returns how many were replaced.

    State shaped like a parameter is sharded as the new one is. Gradients are left behind.
    """
    count = 0
    for group in optimizer.param_groups:
        followed = [new_of.get(id(p), p) for p in group["params"]]
        count += sum(new is not old for new, old in zip(followed, group["params"], strict=True))
        group["params"][:] = followed  # in place: LBFGS keeps the list
    moved = [p for p in optimizer.state if new_of.get(id(p), p) is not p]
    for p in moved:
        new = new_of[id(p)]
        optimizer.state[new] = {name: _like(value, p, new) for name, value in optimizer.state.pop(p).items()}
    return count


def _like(value: Any, old: Tensor, new: Tensor) -> Any:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(value, Tensor) or not isinstance(new, DTensor) or value.shape != old.shape or value.ndim == 0:
        return value
    with torch.no_grad():
        on_device = value.to(new.device_mesh.device_type)
        return distribute_tensor(on_device, new.device_mesh, new.placements, src_data_rank=None).to(new.device)
