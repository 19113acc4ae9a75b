"""The part of a plugin that keeps half-precision weights with float32 masters."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_lowprec.masters.casting import HALF_DTYPES, cast_parameters
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.gradient_dtypes import GradientDtypes
from lightning_lowprec.masters.optimizer import add_masters


class HalfWeights:
    """Casts modules to half precision and gives the optimizers of their parameters float32 masters.

    Modules and optimizers may be set up in any order; the float32 weights from before the cast wait for whoever comes
    second, so that the masters lose nothing.
    """

    def __init__(self, config: MasterConfig, buffer_dtype: torch.dtype | None, gradients: GradientDtypes) -> None:
        self.config = config
        self.buffer_dtype = buffer_dtype
        self.gradients = gradients
        self.not_cast: Callable[[Module], Collection[str]] | None = None
        """Names the parameters of a module that are not cast: float32 ones are their own masters."""
        self._originals: dict[int, Tensor] = {}

    def cast(self, module: Module, dtype: torch.dtype) -> None:
        """Cast the module's parameters in place, and its buffers if ``buffer_dtype`` says so."""
        norms = {
            f"{fqn}.{name}".lstrip(".")
            for fqn, norm in module.named_modules()
            if isinstance(norm, _BatchNorm)  # its weights go with its float32 running statistics
            for name, _ in norm.named_parameters(recurse=False)
        }
        kept = norms if self.not_cast is None else norms.union(self.not_cast(module))
        trained = {id(p) for p in module.parameters() if p.requires_grad}
        keep = self.config.form != "stochastic"
        originals = cast_parameters(module, dtype, keep=keep, buffer_dtype=self.buffer_dtype, skip=kept.__contains__)
        self._originals |= {key: value for key, value in originals.items() if key in trained}
        self.gradients.prepare(module.parameters())

    def under_fsdp2(self) -> HalfWeights | None:
        """What is left to do for half shards, whose gradients FSDP2 reduces in float32; None for float32 ones.

        Raises:
            ValueError: gradients of half shards were to be accumulated in float32.
        """
        if self.config.form == "fp32":
            return None
        if self.gradients.accumulation is not None:
            raise ValueError(
                f"`grad_accumulation_dtype={self.gradients.accumulation}` with half-precision shards is not possible"
                " under FSDP2, which keeps their gradients in the dtype of the shards. Use `master_weights=True`, whose"
                " shards and gradients are float32 there."
            )
        return HalfWeights(self.config, self.buffer_dtype, GradientDtypes(reduce=None, accumulation=None))

    def add_masters(self, optimizer: Optimizer) -> None:
        """Wrap an optimizer; again, when more of its parameters have been cast since."""
        add_masters(optimizer, self.config, values=self._originals)
        self.gradients.prepare(p for group in optimizer.param_groups for p in group["params"])
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.dtype in HALF_DTYPES:
                    self._originals.pop(id(p), None)

    def drop_originals(self) -> None:
        """Drop what waits for an optimizer, when training has begun: none will come."""
        self._originals = {}

    def __repr__(self) -> str:
        """Where the masters live, and what happens to buffers and gradients."""
        return f"{type(self).__name__}({self.config}, buffer_dtype={self.buffer_dtype}, {self.gradients})"

    def __getstate__(self) -> dict[str, object]:
        """Weights stay in their process."""
        return {**self.__dict__, "_originals": {}}
