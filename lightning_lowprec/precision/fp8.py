"""What the plugins with converted layers share: emulation, a plan or an error, and compiled blocks.

FP8 is slow without a compiler: casting and scaling are many small kernels, which only a compiler makes cheap.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import Module
from typing_extensions import override

from lightning_lowprec.checks import CompileOptions, abstract
from lightning_lowprec.conversion.backends import PlanRequest
from lightning_lowprec.conversion.layer_runs import not_called
from lightning_lowprec.conversion.options import Group, LayerOptions
from lightning_lowprec.conversion.plan import Plan, make_plan
from lightning_lowprec.conversion.selection import block_stacks
from lightning_lowprec.hardware import architecture, default_device, describe, emulation_refusal, refusal_and_remedy
from lightning_lowprec.messages import info
from lightning_lowprec.numerics.tensor_cores import UNITS, Emulation
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.loss_scale import BACKEND_STATE
from lightning_lowprec.private.lightning import is_compiled_whole
from lightning_lowprec.private.torch_inductor import block_options
from lightning_lowprec.private.torch_modules import compile_in_place, is_compiled
from lightning_lowprec.private.transformers import has_cache, train_without_cache
from lightning_lowprec.runs_where import RecipeKey

Compile = Literal["auto"] | bool | CompileOptions
"""``"auto"``: on CUDA, unless the user compiled; True: on every device; a mapping: ``torch.compile`` options."""


@dataclass(frozen=True, kw_only=True)
class BlockOptions(Group):
    """The option that compiles blocks.

    Args:
        compile: ``"auto"`` compiles blocks in place on CUDA (MS-AMP's: on GPUs with FP8) unless some are compiled
            already; True compiles them on any device, False never; a mapping gives ``torch.compile`` options. Blocks
            are the children of one class of an ``nn.ModuleList`` or ``nn.Sequential`` that holds converted layers.
    """

    compile: Compile = "auto"


@abstract
class Converting(LowPrecision):
    """Base of the plugins that convert layers, which run by kernels or emulated; all else has a base dtype."""

    @property
    @override
    def peak_rate_dtype(self) -> torch.dtype:
        """``torch.int8`` where FP8 kernels run, else the base dtype; Lightning's tables list FP8's rates there."""
        return self.autocast_dtype if self.emulates(self.modules.device or default_device()) else torch.int8

    @override
    def how(self, device: torch.device) -> str:
        emulation = self.emulates(device)
        if not emulation:
            return f"{self.format} kernels of {describe(device)}"
        codes = "codes and scales as on a GPU, products in float32"
        if isinstance(emulation, str):
            codes = f"codes, scales and sums as on {UNITS[emulation].title}"
        emulated = f"{self.format} is emulated on {describe(device)}"
        return f"{emulated}: {codes}; slow, for tests"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), BACKEND_STATE: self.backend}


def kernel_refusal(recipe: RecipeKey, emulate: Emulation | None, device: torch.device, constructor: str) -> str | None:
    """Return why a device is known not to run a recipe, and the remedy; None if it runs, is emulated, or is not known.

    ``constructor`` is the call that emulates FP8, for the message: ``"FP8TorchAO(..., emulate=True)"``.
    """
    can_emulate = architecture(device).emulates
    if isinstance(emulate, str) and can_emulate:
        return emulation_refusal(recipe, emulate)
    reason = refusal_and_remedy(recipe, device)
    emulated = device.type == "cpu" if emulate is None else emulate
    if reason is None or (can_emulate and emulated):
        return None
    return f"{reason}, or `plugins={constructor}` to emulate FP8, slowly" if can_emulate else reason


def plan_or_raise(module: Module, layers: LayerOptions, request: PlanRequest, *, precision: str) -> Plan:
    """Return the plan for a module; one that converts nothing raises."""
    plan = make_plan(module, layers, request)
    if plan.converted:
        return plan
    none_of = f"none of the {len(plan.rows)} linear layers of {type(module).__name__}"
    raise nothing_converts(precision, none_of, plan, multiple=request.alignment)


def take_plan(plugin: LowPrecision, module: Module, plan: Plan, *lines: str) -> bool:
    """Give a plugin the plan of a module; log the plan and some lines, and return True, if the plan is new."""
    plan = plan.without(not_called(module))
    is_new, plugin.plan = plan != plugin.plan, plan
    if is_new:
        for line in (plan.summary(), *lines):
            info(f"{plugin.precision}: {line}.")
    return is_new


def nothing_converts(precision: str, none_of: str, plan: Plan, *, multiple: int) -> ValueError:
    """Return the error for a plan that converts nothing; ``none_of``: ``"none of the 3 linear layers of Net"``."""
    return ValueError(
        f"`precision={precision!r}` would convert {none_of}, so nothing would run in {plan.format}:\n{plan}\nUse"
        f" a model with Linear layers whose features are multiples of {multiple}, or a precision without"
        f" {plan.format} ('bf16-mixed', 'half-auto')."
    )


# ---- compiled blocks


def compile_blocks(
    module: Module, layers: Iterable[Module], option: Compile, device: torch.device, *, precision: str, advice: str
) -> None:
    """Compile the blocks of ``module`` in place: children of its lists that hold a layer of ``layers``.

    Equal blocks share code, and all fqns stay. ``advice`` ends the message where "auto" finds no blocks.
    """
    by_user = device.type != "cuda" or any(map(is_compiled, module.modules())) or is_compiled_whole(module)
    if option is False and not by_user:
        info(f"{precision}: compile=False: no block is compiled. {advice}")
    if option is False or (option == "auto" and by_user):
        return
    blocks = [block for stack in block_stacks(module, having=layers).values() for block in stack]
    unless = has_cache if blocks and train_without_cache(module) else None
    for block in blocks:
        compile_in_place(block, option if isinstance(option, Mapping) else block_options(), unless=unless)
    if blocks:
        info(f"{precision}: compiling blocks ({len(blocks)}); the first steps are slow.")
    elif option == "auto":
        info(f"{precision}: found no blocks to compile (children of an nn.ModuleList or nn.Sequential). {advice}")
    else:
        raise ValueError(
            f"`compile={option!r}` found no blocks (children of one class in an nn.ModuleList or nn.Sequential"
            " that hold FP8 layers); compile the model yourself with `torch.compile` and pass `compile=False`."
        )
