"""Find the first module whose output, or whose output's gradient, has a value that is not finite.

Hooks on the modules note the largest absolute value of every output and gradient, in the order of execution; NaN and
infinity survive a maximum. The host reads one number per step.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_lowprec.callbacks.sampling import named_layers, on_gradient
from lightning_lowprec.conversion import backends
from lightning_lowprec.private.torch import outside_of_checkpoints, tree_leaves

Direction = Literal["forward", "backward"]
_WHAT: Final = {"forward": "output", "backward": "gradient of the output"}


@final
@dataclass(frozen=True, kw_only=True)
class Nonfinite:
    """The first module with a value that is not finite."""

    step: int
    """Optimizer steps that were made before."""
    direction: Direction
    """Whether the module's output is not finite, or the gradient of its output."""
    fqn: str
    """The module."""
    weights: tuple[str, ...]
    """Those of its parameters that are not finite."""

    def __str__(self) -> str:
        rank = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
        text = f"step {self.step}{rank}: the {_WHAT[self.direction]} of {self.fqn!r} is the first that is not finite"
        return text + (f"; its {', '.join(self.weights)} is not finite either." if self.weights else ".")


@final
class FirstNonfinite:
    """The modules of one model, looked at in every step between :meth:`begin` and :meth:`end`."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[Direction, Nonfinite] = {}
        """The first of the run, for each direction."""
        self._modules = {  # modules without children, and converted layers
            fqn: module
            for fqn, module in named_layers(model)
            if fqn and (backends.owner(module) is not None or next(module.children(), None) is None)
        }
        self._handles = [
            module.register_forward_hook(partial(self._on_forward, fqn)) for fqn, module in self._modules.items()
        ]
        self._step = 0
        self._largest: dict[Direction, list[tuple[str, Tensor]]] = {}

    def begin(self, step: int) -> None:
        """Look at what follows."""
        self._step, self._largest = step, {"forward": [], "backward": []}

    def end(self) -> None:
        """Read what was seen, and warn about the first module of each direction in this run."""
        noted, self._largest = self._largest, {}
        for direction, seen in noted.items():
            if direction in self.found or not seen or bool(torch.stack([v for _, v in seen]).isfinite().all()):
                continue
            fqn = next(fqn for fqn, value in seen if not bool(value.isfinite()))
            module = self._modules[fqn]
            parameters = module.named_parameters(recurse=False)
            weights = tuple(n for n, p in parameters if not bool(p.detach().float().isfinite().all()))
            self.found[direction] = Nonfinite(step=self._step, direction=direction, fqn=fqn, weights=weights)
            warnings.warn(str(self.found[direction]), stacklevel=2)

    def disarm(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._largest = [], {}

    def _on_forward(self, fqn: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._largest or not torch.is_grad_enabled():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
                self._note("forward", fqn, tensor)
                if tensor.requires_grad:
                    on_gradient(tensor, partial(self._note, "backward", fqn))

    def _note(self, direction: Direction, fqn: str, tensor: Tensor) -> None:
        noted = self._largest.get(direction)
        if noted is None:
            return
        with torch.no_grad(), outside_of_checkpoints():
            noted.append((fqn, torch.linalg.vector_norm(tensor.detach(), ord=math.inf).float()))
