"""The plan of a model: every weight that is multiplied with the tokens, converted or kept with a reason.

A plan is a plain value: it prints as a table, and two plans can be compared. Making a plan touches no weight, so a
model on the meta device works. A plugin applies exactly its plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import get_args

from torch import nn

from lightning_lowprec.conversion import selection
from lightning_lowprec.conversion.gains import DEFAULT_TOKENS, Recipe, expected_gain
from lightning_lowprec.conversion.matmuls import STACKED, Matmul, is_conv1d, matmuls
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.recipe_map import NO_PATTERN, LayerRecipe, RecipeMap


@dataclass(frozen=True, kw_only=True)
class PlanRow(Matmul):
    """One weight of the model, and whether the weight converts."""

    kept_because: str | None
    """The reason why the weight stays in high precision; None: the weight converts."""
    gain: float | None
    """Expected speed of FP8 over bf16 for this shape (see ``gains``); None: slower than bf16."""
    trains: bool
    """Whether the weight has a gradient: a frozen weight skips the GEMM of the weight gradient."""
    recipe: str | None = None
    """With recipes per layer, the recipe of a weight that converts, in words; None: one recipe for all."""

    @property
    def slower(self) -> bool:
        """Whether FP8 is expected to lose against bf16 at this shape."""
        return self.gain is None or self.gain < 1.0


@dataclass(frozen=True)
class Plan:
    """The rows of all weights of one model."""

    rows: tuple[PlanRow, ...]
    recipes: Mapping[str, LayerRecipe] = field(default_factory=dict, hash=False)
    """With recipes per layer, the recipe of every weight that converts, by fqn."""

    @property
    def converted(self) -> tuple[str, ...]:
        """The fqns that convert, in the model's order."""
        return tuple(row.fqn for row in self.rows if row.kept_because is None)

    @property
    def linears(self) -> tuple[str, ...]:
        """The fqns of the layers that convert."""
        return tuple(row.fqn for row in self.rows if row.kept_because is None and row.kind != STACKED)

    @property
    def stacked(self) -> tuple[str, ...]:
        """The fqns of the Parameters of stacked experts that convert."""
        return tuple(row.fqn for row in self.rows if row.kept_because is None and row.kind == STACKED)

    def below_break_even(self) -> tuple[PlanRow, ...]:
        """Return the converted rows that FP8 is expected to slow down."""
        return tuple(row for row in self.rows if row.kept_because is None and row.slower)

    def summary(self) -> str:
        """Return one line: ``converted 24 of 25 linear layers, kept 1: output head (by name) ('lm_head')``."""
        text = f"converted {len(self.converted)} of {len(self.rows)} linear layers"
        if self.recipes:
            counts = Counter(map(str, self.recipes.values()))
            text += f" ({'; '.join(f'{count} {recipe}' for recipe, count in counts.items())})"
        kept = [row for row in self.rows if row.kept_because is not None]
        if not kept:
            return text
        reasons = Counter(row.kept_because for row in kept)
        first = {reason: next(row.fqn for row in kept if row.kept_because == reason) for reason in reasons}
        parts = [
            f"{reason} ({first[reason]!r}{f' and {n - 1} more' if n > 1 else ''})" for reason, n in reasons.items()
        ]
        return f"{text}, kept {len(kept)}: {'; '.join(parts)}"

    def __str__(self) -> str:
        """Show a table, one line per weight."""
        if not self.rows:
            return "(the model has no Linear)"
        width = max(len(row.fqn) for row in self.rows)
        lines = []
        for row in self.rows:
            shape = f"{row.in_features} -> {row.out_features}" + (f" x {row.stored}" if row.stored > 1 else "")
            fp8 = "FP8" if row.recipe is None else f"FP8 ({row.recipe})"
            lines.append(
                f"{row.fqn:<{width}}  {shape:>16}  {fp8 if row.kept_because is None else 'kept: ' + row.kept_because}"
            )
        return "\n".join(lines)


def make_plan(
    model: nn.Module,
    options: LayerOptions | None = None,
    *,
    recipe: Recipe | RecipeMap = "tensorwise",
    alignment: int = selection.FEATURE_ALIGNMENT,
    converted_class: type[nn.Module] | None = None,
    stores_codes: bool = False,
    conv1d: bool = True,
    experts: str | None = selection.NO_GROUPED_PRODUCT,
) -> Plan:
    """Return the plan for ``model``. Read names, shapes and dtypes only: a model on the meta device works.

    Args:
        model: any module, also a single Linear.
        options: the user's choices beside the built-in rules.
        recipe: the recipe whose break-even points and gains are used, or recipes per layer.
        alignment: features must be multiples of this number.
        converted_class: the class that an earlier plan gave to Linears; such a layer gets the row of a Linear.
        stores_codes: weights become parameters of codes, so a weight that a hook computes at each forward is kept.
        conv1d: whether ``Conv1D`` of transformers can convert, whose weight is [in, out].
        experts: why stacked experts stay in high precision; None: they convert.

    Raises:
        ValueError: a name or pattern matches no Linear, or the options ask for blocks in a model without blocks.
    """
    options = options or LayerOptions()
    reasons = selection.by_user(model, options)
    if options.only is None:
        reasons = selection.built_in(model) | reasons
    found = []
    for matmul, module in matmuls(model):
        reason = selection.unsupported(matmul, module, alignment, converted_class, experts) or reasons.get(matmul.fqn)
        if reason is None and is_conv1d(module) and not conv1d:
            reason = "no Linear (Conv1D)"
        if reason is None and stores_codes:
            reason = selection.computed_weight(module)
        trains = any(p.requires_grad for p in module.parameters(recurse=False))
        if reason is None and options.frozen == "keep" and not trains:
            reason = "frozen"
        found.append((matmul, trains, reason))
    if isinstance(recipe, RecipeMap):
        recipe.check({matmul.fqn: reason for matmul, _, reason in found})
    rows, recipes = [], {}
    for matmul, trains, reason in found:
        own = None
        name: str | None = recipe if isinstance(recipe, str) else recipe.names[0]
        if isinstance(recipe, RecipeMap):
            own, reason = _from_map(recipe, matmul.fqn, reason)
            name = name if own is None else own.name
        gain = expected_gain(_known(name), matmul.in_features, matmul.out_features, options.tokens or DEFAULT_TOKENS)
        if reason is None and _too_small(gain, options.threshold):
            reason = f"too small to gain (below {options.threshold:g}x)"
        if reason is None and own is not None:
            recipes[matmul.fqn] = own
        words = str(own) if matmul.fqn in recipes else None
        rows.append(PlanRow(**asdict(matmul), kept_because=reason, gain=gain, trains=trains, recipe=words))
    return Plan(tuple(rows), recipes)


def _from_map(recipes: RecipeMap, fqn: str, reason: str | None) -> tuple[LayerRecipe | None, str | None]:
    """Return the recipe of a weight, if the weight converts, and the reason if it is kept."""
    if reason is not None:
        return None, reason
    found = recipes.of_layer(fqn)
    if found is None:
        return None, NO_PATTERN
    pattern, own = found
    return (None, f"'bf16' in `recipe` ({pattern!r})") if own.is_kept else (own, None)


def _known(recipe: object) -> Recipe:
    """Return the recipe if there are figures for its gains, else the recipe that is nearest."""
    known: tuple[Recipe, ...] = get_args(Recipe)
    return next((name for name in known if name == recipe), "tensorwise")


def _too_small(gain: float | None, threshold: float | None) -> bool:
    if threshold is None:
        return False
    return threshold >= 1.0 if gain is None else gain < threshold
