"""Let optimizers that were built before sharding update the parameters that sharding made.

``fully_shard`` replaces every parameter by a new DTensor. An optimizer that was built earlier would go on updating
tensors that no model has: nothing fails, and nothing trains.
"""

from __future__ import annotations

import weakref
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lowprec.checkpoints.placement import place


@final
class ReplacedParameters:
    """The parameters of ``model`` before and after sharding: made before, with :meth:`record` called after."""

    def __init__(self, model: nn.Module) -> None:
        # weak references: nothing here may keep the unsharded weights alive. The id of a dead one may be taken again
        self._old = {fqn: (id(p), weakref.ref(p)) for fqn, p in model.named_parameters(remove_duplicate=False)}
        self._new: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def record(self, model: nn.Module) -> None:
        """Note the new parameters, by the names of the old ones."""
        new = dict(model.named_parameters(remove_duplicate=False))
        lost = self._old.keys() - new.keys()
        if lost:
            raise RuntimeError(
                f"sharding renamed or removed parameters of {type(model).__name__} ({', '.join(sorted(lost)[:3])});"
                " optimizers and checkpoints could not find them again."
            )
        self._new = {number: (old, new[fqn]) for fqn, (number, old) in self._old.items()}

    def put_into(self, optimizer: Optimizer) -> None:
        """Replace old parameters in an optimizer's groups and state; gradients are left behind.

        State with the shape of a parameter is sharded as the new parameter is.
        """
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._new]
        new_of = {id(p): self._new[id(p)][1] for p in held if self._new[id(p)][0]() is p}
        for group in optimizer.param_groups:
            group["params"][:] = [new_of.get(id(p), p) for p in group["params"]]  # in place: LBFGS keeps the list
        for p in [p for p in optimizer.state if id(p) in new_of]:
            new = new_of[id(p)]
            optimizer.state[new] = {
                name: place(v, new) if isinstance(v, Tensor) and v.ndim > 0 and v.shape == p.shape else v
                for name, v in optimizer.state.pop(p).items()
            }
