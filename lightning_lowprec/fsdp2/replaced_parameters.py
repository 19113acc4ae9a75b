"""Let optimizers that were built before sharding update the parameters that sharding made.

``fully_shard`` replaces every parameter by a new DTensor. An optimizer that was built earlier would go on updating
tensors that no model has: nothing fails, and nothing trains.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_lowprec.fsdp2.placement import place


class ReplacedParameters:
    """The parameters of ``model`` before and after sharding: made before, with :meth:`record` called after."""

    def __init__(self, model: nn.Module) -> None:
        self._model: nn.Module | None = model
        # weak references: nothing here may keep the unsharded weights alive. The id of a dead one may be taken again
        self._old = {fqn: weakref.ref(p) for fqn, p in model.named_parameters(remove_duplicate=False)}
        self._ids = {fqn: id(p) for fqn, p in model.named_parameters(remove_duplicate=False)}
        self._new: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def record(self) -> None:
        """Note the new parameters, by the names of the old ones.

        Raises:
            RuntimeError: sharding has renamed a parameter, so nothing says which one it replaces.
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

    def put_into(self, optimizer: Optimizer) -> None:
        """Replace old parameters in an optimizer's groups and state; gradients are left behind.

        State with the shape of a parameter is sharded as the new parameter is.
        """
        new_of: dict[int, nn.Parameter] = {}
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            old, new = self._new.get(id(p), (None, p))
            if old is not None and old() is p:
                new_of[id(p)] = new
        for group in optimizer.param_groups:
            group["params"][:] = [new_of.get(id(p), p) for p in group["params"]]  # in place: LBFGS keeps the list
        for p in [p for p in optimizer.state if id(p) in new_of]:
            new = new_of[id(p)]
            state = optimizer.state.pop(p)
            optimizer.state[new] = {name: _sharded_like(new, value, p.shape) for name, value in state.items()}


def _sharded_like(param: Tensor, value: Any, shape: tuple[int, ...]) -> Any:
    has_shape = isinstance(value, Tensor) and value.ndim > 0 and value.shape == shape
    return place(value, param) if has_shape and isinstance(param, DTensor) else value
