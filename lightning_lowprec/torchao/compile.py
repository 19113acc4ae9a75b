"""Compiling the repeated blocks of a model in place.

FP8 is slow without a compiler: casting and scaling are many small kernels that only fusion makes cheap. Compiling
one block of a stack of equals compiles them all (the code is shared), keeps every fqn, and stays clear of the
embedding and the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from lightning_lowprec.conversion.selection import repeated_stacks
from lightning_lowprec.torchao.linear import fp8_linears


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """By fqn: the children of a ModuleList that share one class and hold FP8 layers; the outermost lists only."""
    stacks = repeated_stacks(model, having=fp8_linears(model))
    return {f"{fqn}.{i}".lstrip("."): block for fqn, stack in stacks.items() for i, block in enumerate(stack)}


def is_compiled(model: nn.Module) -> bool:
    """Whether the user compiled the model or a part of it, by ``torch.compile`` or ``module.compile()``."""
    return any(
        isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def compile_blocks(model: nn.Module, options: Mapping[str, Any]) -> int:
    """Compile the repeated blocks in place with these ``torch.compile`` options; returns how many there are."""
    blocks = repeated_blocks(model)
    for block in blocks.values():
        block.compile(**options)
    return len(blocks)
