"""Check that a conversion changed nothing that optimizers, ties and checkpoints depend on.

Optimizer state depends on the order of ``parameters()``, ties on the identity of Parameter objects, and checkpoints on
names. After a conversion that changes the order, an object or a name, the model would train wrongly without an error.
The check walks over the modules once and touches no weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy


@contextmanager
def unchanged(model: nn.Module, *, may_change: str | None = None) -> Iterator[None]:
    """Raise if the body of the ``with`` statement changes a fact that conversion must keep, except ``may_change``."""
    alive = [*model.modules(), *model.parameters(), *model.buffers()]  # so that no id is used again
    before = _facts(model)
    yield
    after = _facts(model)
    for what, old in before.items():
        new = after[what]
        if old == new or what == may_change:
            continue
        fqn = next(fqn for fqn in {**old, **new} if old.get(fqn) != new.get(fqn))
        raise RuntimeError(
            f"Conversion of {type(model).__name__} changed {what} of {fqn!r} (before {old.get(fqn)!r}, after"
            f" {new.get(fqn)!r}); nothing would be saved, tied or optimized as before. Leave this layer out with"
            " `keep=[...]`, and please report it."
        )
    del alive


def _facts(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the value of every fact by fqn. Dicts compare without order, so places are listed as separate facts."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors: dict[str, torch.Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    transient = {f"{fqn}.{name}".lstrip(".") for fqn, m in modules.items() for name in m._non_persistent_buffers_set}
    saved = (fqn for fqn in tensors if fqn not in transient)
    return {
        "the module object": {fqn: id(module) for fqn, module in modules.items()},
        "the Parameter or buffer object": {fqn: id(tensor) for fqn, tensor in tensors.items()},
        "the place in parameters()": {fqn: place for place, (fqn, _) in enumerate(model.named_parameters())},
        "requires_grad": {fqn: tensor.requires_grad for fqn, tensor in tensors.items()},
        "the dtype": {fqn: tensor.dtype for fqn, tensor in tensors.items()},
        "the device": {fqn: tensor.device for fqn, tensor in tensors.items()},
        "the shape": {fqn: None if is_lazy(tensor) else tensor.shape for fqn, tensor in tensors.items()},
        "train or eval": {fqn: module.training for fqn, module in modules.items()},
        "the hooks": {fqn: _hooks(module) for fqn, module in modules.items()},
        "the place in the state dict": {fqn: place for place, fqn in enumerate(saved)},
    }


def _hooks(module: nn.Module) -> dict[str, list[int]]:
    return {
        name: [id(hook) for hook in value.values()]
        for name, value in vars(module).items()
        if name.endswith("_hooks") and isinstance(value, dict) and value
    }
