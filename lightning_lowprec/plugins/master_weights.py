"""The part of a plugin that keeps half-precision weights with float32 masters."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_lowprec.optim.casting import HALF_DTYPES, cast_parameters
from lightning_lowprec.optim.master_book import MasterConfig
from lightning_lowprec.optim.masters import is_wrapped, wrap

MasterWeights = bool | Literal["remainder", "stochastic"] | MasterConfig


def resolve_master_weights(base: Literal["bf16", "fp16", "auto"], choice: MasterWeights) -> MasterConfig | None:
    """Where the masters live, or None for float32 weights.

    Raises:
        ValueError: an unknown form, or one that needs bf16 with fp16.
    """
    if choice is False:
        return None
    if not (isinstance(choice, MasterConfig) or choice is True or choice in ("remainder", "stochastic")):
        allowed = "False, True, 'remainder', 'stochastic', a MasterConfig"
        raise ValueError(f"`master_weights={choice!r}` is not valid; expected one of: {allowed}.")
    config = MasterConfig.of("fp32" if choice is True else choice)
    if base == "fp16" and config.form != "fp32":
        raise ValueError(
            f"`master_weights={choice!r}` is not valid with fp16: it rests on bf16 being the upper half of float32;"
            " use `master_weights=True`, or bf16."
        )
    return config


class Masters:
    """Casts modules to half precision and gives the optimizers of their parameters float32 masters.

    Modules and optimizers may be set up in any order; the float32 weights from before the cast wait for whoever comes
    second, so that the masters lose nothing.
    """

    def __init__(self, config: MasterConfig, buffer_dtype: torch.dtype | None) -> None:
        self.config = config
        self.buffer_dtype = buffer_dtype
        self._originals: dict[int, Tensor] = {}

    def cast(self, module: Module, dtype: torch.dtype) -> None:
        """Cast the module's parameters in place, and its buffers if ``buffer_dtype`` says so."""
        keep = self.config.form != "stochastic"
        self._originals |= cast_parameters(module, dtype, keep=keep, buffer_dtype=self.buffer_dtype)

    def give(self, optimizer: Optimizer) -> None:
        """Wrap an optimizer that holds half-precision parameters; others wait until their module is cast."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if is_wrapped(optimizer) or not any(p.dtype in HALF_DTYPES for p in params):
            return
        wrap(optimizer, self.config, values=self._originals)
        for p in params:
            self._originals.pop(id(p), None)

    def forget(self) -> None:
        """Drop what waits for an optimizer: none will come."""
        self._originals = {}

    def __repr__(self) -> str:
        """Where the masters live, and what happens to buffers."""
        return f"{type(self).__name__}({self.config}, buffer_dtype={self.buffer_dtype})"

    def __getstate__(self) -> dict[str, object]:
        """Weights stay in their process."""
        return {**self.__dict__, "_originals": {}}
