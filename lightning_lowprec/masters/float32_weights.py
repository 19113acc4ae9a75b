"""Make trainable half-precision weights float32, and let their optimizers follow.

``transformers`` loads weights in the dtype of the checkpoint, often bf16, and masters leave half-precision weights in a
model. A precision with float32 weights would train both without masters, and lose updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_lowprec.conversion import backends
from lightning_lowprec.masters.coded_state import decode_on_load
from lightning_lowprec.masters.coupled import coupled
from lightning_lowprec.masters.half_weights import cast_parameter, is_marked, mark
from lightning_lowprec.masters.optimizer import float32_state, remove_masters
from lightning_lowprec.masters.registry import existing_masters
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.private.torchao import parameters_of_copies


@dataclass(frozen=True, kw_only=True)
class Change:
    """The parameters that became float32."""

    parameters: int
    """Their number."""
    bytes: int
    """The bytes that they take more than before."""
    exact: int
    """The number of them that got the value of a master that an optimizer still had."""

    def __str__(self) -> str:
        """Return the end of a log line."""
        rounded = self.parameters - self.exact
        source = "their rounded values" if not self.exact else "their masters' values"
        if self.exact and rounded:
            source += f" ({rounded} of them from rounded values, without masters)"
        return (
            f"{self.parameters} trainable half-precision parameters became float32, {self.bytes} bytes more, and start"
            f" from {source}"
        )


@final
class Float32Weights:
    """Makes parameters float32, and lets optimizers follow."""

    def __init__(self) -> None:
        self._fqns: set[str] = set()

    def make(self, module: Module, *, frozen_too: bool = False) -> Change | None:
        """Make the trainable half-precision parameters of ``module`` float32, in place; return None if there are none.

        Parameter objects, ties and gradients stay. A parameter gets the value of its master, if an optimizer of an
        earlier run still has one. Codes, buffers, and frozen parameters that no plugin has cast, stay as they are.
        Buffers that are computed with a parameter that changes (running statistics of batch norm, vectors of
        spectral_norm) become float32 too. With ``frozen_too`` all frozen parameters change, to be unfrozen later.
        """
        half = [p for p in module.parameters() if p.dtype in HALF_DTYPES and not backends.keeps_master(p)]
        half = [p for p in half if p.requires_grad or frozen_too or is_marked(p)]
        if not half:
            return None
        return self._make(module, half, existing_masters(half))

    def undo_cast(self, module: Module, masters: Mapping[int, Tensor]) -> Change | None:
        """Make the half-precision parameters of ``module`` float32 that a plugin has cast; return None if none are.

        Args:
            module: changed in place, as by :meth:`make`.
            masters: float32 values by ``id(parameter)``; other parameters keep their rounded values.
        """
        half = [p for p in module.parameters() if p.dtype in HALF_DTYPES and is_marked(p)]
        return self._make(module, half, masters) if half else None

    def _make(self, module: Module, half: list[Parameter], masters: Mapping[int, Tensor]) -> Change:
        more = sum(p.numel() * (4 - p.element_size()) for p in half if not torch.nn.parameter.is_lazy(p))
        for p in half:
            cast_parameter(p, torch.float32)
            if id(p) in masters:
                p.data.copy_(masters[id(p)])
            mark(p)
        for group in coupled(module):
            if any(map(_is_made, group.params)):
                for buffer in group.buffers:
                    buffer.data = buffer.data.float()
        self._fqns.update(fqn for fqn, p in module.named_parameters() if _is_made(p))
        return Change(parameters=len(half), bytes=more, exact=sum(id(p) in masters for p in half))

    def note_sharded(self, module: Module) -> None:
        """Note that sharding has replaced the parameters of ``module``."""
        for fqn, p in module.named_parameters():
            if fqn in self._fqns:
                mark(p)

    def follow(self, optimizer: Optimizer) -> None:
        """Remove masters that ``optimizer`` has of these parameters, and make its half-precision state float32."""
        if parameters_of_copies(optimizer) is not None:  # its own optimizers were never any other precision's
            return
        made = list(filter(_is_made, parameters_of(optimizer)))
        if made:
            remove_masters(optimizer)
        for p in [p for p in made if p in optimizer.state]:
            optimizer.state[p] = float32_state(optimizer.state[p])
        decode_on_load(optimizer)

    def __repr__(self) -> str:
        """Show the class alone: there are no options."""
        return f"{type(self).__name__}()"


def _is_made(parameter: Tensor) -> bool:
    return parameter.dtype is torch.float32 and is_marked(parameter)
