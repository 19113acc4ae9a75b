"""Gather the root's weights at their next use, and let ``parameters()`` show the shards until then.

In manual optimization a backward pass and a step lie inside ``training_step``. After them, user code looks at gradients
and weights: it clips, edits, averages. Gradients belong to the shards. So the root's weights are freed there, and they
are gathered again only if a module that needs them runs in the rest of ``training_step``, as in a GAN.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_lowprec.fsdp2.fp8_gather import GatherScales
from lightning_lowprec.private.torch_modules import before_compiled_call


class _Handle(Protocol):
    def remove(self) -> None: ...


@final
class LazyGather:
    """The next gather of the root of ``model``; ``scales`` are refreshed before it."""

    def __init__(self, model: nn.Module, scales: GatherScales | None) -> None:
        self._model = weakref.ref(model)
        self._scales = scales
        self._handles: list[_Handle] = []

    def arm(self) -> None:
        """Free the root's weights, and gather them when a module that may use them is called."""
        model: Any = self._model()
        if model is None:
            return
        model.reshard()
        if not self._handles:
            for module in dict.fromkeys(_modules_of_root(model)):  # once, where two modules share a third
                self._handles.append(module.register_forward_pre_hook(self._gather))
                self._handles += before_compiled_call(module, self._gather)

    def disarm(self) -> None:
        """Forget the gather."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gather(self, *_: Any) -> None:
        self.disarm()
        if self._scales is not None:
            self._scales.refresh()
        model: Any = self._model()
        model.unshard()


def _modules_of_root(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules below the root whose weights no inner group gathers."""
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield child
            yield from _modules_of_root(child)
