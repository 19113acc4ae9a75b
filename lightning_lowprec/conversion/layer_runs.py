"""Note which converted layers run, and which weights a model reads without a call of their layer.

A layer notes its own run, where no compiler compiles it: ``note_run`` costs a step nothing once nobody waits. The
module around a layer notes its run by a hook that removes itself. If the module ran and the layer did not, and the
weight got a gradient all the same, the weight was read: ``F.linear(x, self.qkv.weight)``.
"""

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.in_place import RoleModule
from lightning_lowprec.conversion.matmuls import is_linear
from lightning_lowprec.private.torch_modules import is_compiled

waiting: WeakSet[Module] = WeakSet()  # the converted layers that have not run since their set-up
_around: WeakKeyDictionary[Module, RemovableHandle] = WeakKeyDictionary()
"""The modules around such layers that have not run, and the handles of their hooks."""
_read: WeakSet[Module] = WeakSet()  # the converted layers whose weight was read without a call


def note_run(layer: Module) -> None:
    """Note that a converted layer runs, uncompiled."""
    if not torch.compiler.is_compiling() and waiting:
        waiting.discard(layer)


def _note_around(module: Module, _: object) -> None:
    if not torch.compiler.is_compiling() and (handle := _around.pop(module, None)) is not None:
        handle.remove()


def await_runs(model: Module) -> None:
    """Wait for the runs of converted layers and of the modules around them; compiled code is not looked at."""
    for _, layer, around in _layers(model):
        if layer not in _read:
            waiting.add(layer)
        if layer in waiting and around not in _around:
            _around[around] = around.register_forward_pre_hook(_note_around, prepend=True)


def end_waiting(model: Module) -> None:
    """Stop waiting for the runs of a model's layers; hooks that are left stay, or compiled code would compile again."""
    for module in model.modules():
        waiting.discard(module)


def remove_hooks(model: Module) -> None:
    """Stop waiting, and remove the hooks that are left."""
    end_waiting(model)
    for module in model.modules():
        if (handle := _around.pop(module, None)) is not None:
            handle.remove()


def read_without_call(model: Module) -> dict[str, Module]:
    """Note and return the layers, by fqn, that did not run though the one around did and the weight has a gradient."""
    found = {
        fqn: layer
        for fqn, layer, around in _layers(model)
        if layer in waiting and around not in _around and layer.weight.grad is not None
    }
    _read.update(found.values())
    return found


def not_called(model: Module) -> set[str]:
    """Return the layers of a model whose weight was read without a call of the layer, by fqn."""
    return {fqn for fqn, layer in model.named_modules() if layer in _read}


def _layers(model: Module) -> Iterator[tuple[str, Any, Module]]:
    """Yield every converted Linear outside of compiled modules, and the innermost module around that has a forward."""
    for fqn, layer in model.named_modules():
        backend = backends.owner(layer)
        if backend is None or not backend.notes_runs or not is_linear(layer):
            continue
        if isinstance(layer, RoleModule) or layer is model:
            continue
        parts = fqn.split(".")
        outer = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts))]
        if not any(map(is_compiled, (*outer, layer))):
            yield fqn, layer, next((m for m in reversed(outer) if type(m).forward is not Module.forward), model)
