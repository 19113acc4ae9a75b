"""Compile the blocks of a model in place: equal blocks share code, and all fqns stay.

FP8 is slow without a compiler: casting and scaling are many small kernels, which only a compiler makes cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch.nn import Module

from lightning_lowprec.checks import CompileOptions
from lightning_lowprec.conversion.selection import block_stacks
from lightning_lowprec.precision.engine import Engine
from lightning_lowprec.private.lightning import is_compiled_whole
from lightning_lowprec.private.torch_modules import compile_in_place, is_compiled

Compile = Literal["auto"] | bool | CompileOptions
"""``"auto"``: on CUDA, unless the user compiled; True: on every device; a mapping: ``torch.compile`` options."""


def engine_refusal(engine: Engine, option: Compile) -> str | None:
    """Return why blocks cannot be compiled as the user wants under an engine, as the end of a sentence."""
    if engine.frees_weights and option not in ("auto", False):
        return f"`compile={option!r}` compiles blocks whose weights are freed. Leave it out, or use stage 2"
    return None


def compile_blocks(
    module: Module, layers: Iterable[Module], option: Compile, device: torch.device, *, precision: str, advice: str
) -> None:
    """Compile the blocks of ``module``: children of its ModuleLists that hold a layer of ``layers``.

    Args:
        module: the module that was converted.
        layers: its FP8 layers.
        option: the user's choice.
        device: where the module runs.
        precision: the name of the precision, for messages.
        advice: the end of the message where "auto" finds no blocks.

    Raises:
        ValueError: the user wants compiled blocks, and there are none.
    """
    if option is False:
        return
    if option == "auto" and (
        device.type != "cuda" or any(map(is_compiled, module.modules())) or is_compiled_whole(module)
    ):
        return
    blocks = [block for stack in block_stacks(module, having=layers).values() for block in stack]
    for block in blocks:
        compile_in_place(block, **(option if isinstance(option, Mapping) else {}))
    if blocks:
        rank_zero_info(f"{precision}: compiling blocks ({len(blocks)}); the first steps are slow.")
    elif option == "auto":
        rank_zero_info(f"{precision}: found no blocks to compile (children of an nn.ModuleList). {advice}")
    else:
        raise ValueError(
            f"`compile={option!r}` found no blocks (children of one class in an nn.ModuleList that hold FP8"
            " layers); compile the model yourself with `torch.compile` and pass `compile=False`."
        )
