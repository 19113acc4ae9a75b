"""Functions that the FP8 plugins share: emulation, refusals, and a plan that converts a layer or raises."""

from __future__ import annotations

from typing import Final

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch.nn import Module

from lightning_lowprec.conversion.gains import DEFAULT_TOKENS, SOURCE
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.plan import Plan, PlanRequest, make_plan
from lightning_lowprec.hardware import architecture, default_device, describe, refusal_and_remedy
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.layer_calls import not_called
from lightning_lowprec.runs_where import RecipeKey

_LINEARS_ONLY: Final = PlanRequest(conv1d=False)


def emulates(emulate: bool | None, device: torch.device) -> bool:
    """Return whether FP8 is emulated on ``device``: the user's choice, by default yes on CPU and no on a GPU."""
    return device.type == "cpu" if emulate is None else emulate


def kernel_refusal(recipe: RecipeKey, emulate: bool | None, device: torch.device, constructor: str) -> str | None:
    """Return why a device is known not to run a recipe, and the remedy; None if it runs, is emulated, or is not known.

    Args:
        recipe: the row of the table.
        emulate: the user's choice.
        device: the device of the model.
        constructor: the call that emulates FP8, for the message: ``"FP8TorchAO(..., emulate=True)"``.
    """
    can_emulate = architecture(device).emulates
    reason = refusal_and_remedy(recipe, device)
    if reason is None or (can_emulate and emulates(emulate, device)):
        return None
    return f"{reason}, or `plugins={constructor}` to emulate FP8, slowly" if can_emulate else reason


def how(emulate: bool | None, device: torch.device) -> str:
    """Return one line: FP8 kernels, or emulation."""
    if not emulates(emulate, device):
        return f"FP8 kernels of {describe(device)}"
    return (
        f"FP8 is emulated on {describe(device)}: codes and scales as on a GPU, products in float32; slow, for"
        " tests and for looking at the numerics"
    )


def peak_dtype(plugin: LowPrecision) -> torch.dtype:
    """Return ``torch.int8`` where FP8 kernels run, else the base dtype; see ``LowPrecision.peak_rate_dtype``."""
    return plugin.autocast_dtype if plugin.emulates(plugin.modules.device or default_device()) else torch.int8


def plan_or_raise(
    module: Module, layers: LayerOptions, request: PlanRequest = _LINEARS_ONLY, *, precision: str
) -> Plan:
    """Return the plan for a module. A plan that converts nothing raises, except with ``min_gain="auto"``: then log it.

    Args:
        module: the module to convert.
        layers: the user's choices.
        request: what the precision asks for.
        precision: the name of the precision, for messages.

    Raises:
        ValueError: nothing converts.
    """
    plan = make_plan(module, layers, request)
    if plan.converted:
        return plan
    found = f"none of the {len(plan.rows)} linear layers of {type(module).__name__}"
    if layers.min_gain == "auto":
        tokens = layers.tokens or DEFAULT_TOKENS
        rank_zero_info(
            f"{precision}: min_gain='auto' converts {found} (at {tokens} tokens per step, {SOURCE});"
            f" everything runs in {request.base}."
        )
        return plan
    raise nothing_converts(precision, found, plan, multiple=request.alignment)


def take_plan(plugin: LowPrecision, module: Module, plan: Plan, *lines: str) -> bool:
    """Give a plugin the plan of a module; log the plan and some lines, and return True, if the plan is new."""
    plan = plan.without(not_called(module))
    is_new, plugin.plan = plan != plugin.plan, plan
    if is_new:
        for line in (plan.summary(), *lines):
            rank_zero_info(f"{plugin.precision}: {line}.")
    return is_new


def nothing_converts(precision: str, found: str, plan: Plan, *, multiple: int) -> ValueError:
    """Return the error for a plan that converts nothing.

    Args:
        precision: the name of the precision.
        found: ``"none of the 3 linear layers of Net"``.
        plan: the plan, which the message shows as a table.
        multiple: features must be multiples of this number.
    """
    return ValueError(
        f"`precision={precision!r}` would convert {found}, so nothing would run in {plan.format}:\n{plan}\nUse"
        f" a model with Linear layers whose features are multiples of {multiple}, or a precision without"
        f" {plan.format} ('bf16-mixed', 'half-auto')."
    )
