"""The plan of an FP8 plugin for a module, which converts something or raises."""

from __future__ import annotations

from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch.nn import Module

from lightning_lowprec.conversion.gains import DEFAULT_TOKENS, SOURCE, Recipe
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.plan import Plan, make_plan


def plan_or_raise(
    module: Module,
    layers: LayerOptions,
    *,
    precision: str,
    base: str,
    recipe: Recipe = "tensorwise",
    converted: type[Module] | None = None,
) -> Plan:
    """The plan; one that converts nothing is fine, and said so, only with ``min_gain="auto"``.

    Args:
        module: what is set up.
        layers: the user's wishes.
        precision: its name, for messages.
        base: the dtype of everything else, for messages.
        recipe: see ``make_plan``.
        converted: see ``make_plan``.

    Raises:
        ValueError: nothing converts.
    """
    plan = make_plan(module, layers, recipe=recipe, converted=converted)
    if plan.converted:
        return plan
    found = f"none of the {len(plan.rows)} linear layers of {type(module).__name__}"
    if layers.min_gain == "auto":
        tokens = layers.tokens or DEFAULT_TOKENS
        rank_zero_info(
            f"{precision}: min_gain='auto' converts {found} (at {tokens} tokens per step, {SOURCE});"
            f" everything runs in {base}."
        )
        return plan
    raise ValueError(
        f"`precision={precision!r}` would convert {found}, so nothing would run in FP8:\n{plan}\nUse"
        " a model with Linear layers whose features are multiples of 16, or a precision without FP8 ('bf16-mixed',"
        " 'half-auto')."
    )
