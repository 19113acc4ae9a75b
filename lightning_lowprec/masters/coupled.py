"""Find parameters that are computed with buffers, and so must have the buffers' dtype.

Autocast does not help such a parameter: batch norm refuses weights and running statistics of two dtypes, and the power
iteration of spectral_norm multiplies the weight by buffers outside of the operations that autocast knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_lowprec.private.torch_modules import is_batch_norm


@dataclass(frozen=True, kw_only=True)
class Coupled:
    """Parameters and floating-point buffers of one module that must have one dtype."""

    params: list[nn.Parameter]
    buffers: list[Tensor]
    is_batch_norm: bool


def coupled(module: nn.Module) -> Iterator[Coupled]:
    """Yield the parameters of batch norms and of both kinds of spectral_norm in ``module``, with their buffers."""
    for part in module.modules():
        if is_batch_norm(part):
            yield _coupled(list(part.parameters(recurse=False)), list(part.buffers(recurse=False)), is_batch_norm=True)
        elif isinstance(part, ParametrizationList):
            yield _coupled(list(part.parameters(recurse=False)), list(part.buffers()))
        params, buffers = dict(part.named_parameters(recurse=False)), dict(part.named_buffers(recurse=False))
        for name in [name.removesuffix("_orig") for name in params if name.endswith("_orig")]:
            if {f"{name}_u", f"{name}_v"} <= buffers.keys():  # `torch.nn.utils.spectral_norm`, which is a hook
                yield _coupled([params[f"{name}_orig"]], [buffers[f"{name}_u"], buffers[f"{name}_v"]])


def _coupled(params: list[nn.Parameter], buffers: list[Tensor], *, is_batch_norm: bool = False) -> Coupled:
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    return Coupled(params=params, buffers=floating, is_batch_norm=is_batch_norm)
