"""The plan of a model: every weight that is multiplied with the tokens, converted or kept with a reason.

A plan is a plain value: it prints as a table, and two plans can be compared. Making a plan touches no weight, so a
model on the meta device works. A plugin applies exactly its plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final, get_args

from torch import nn

from lightning_lowprec.conversion import plan_table, selection
from lightning_lowprec.conversion.gains import DEFAULT_TOKENS, Recipe, expected_gain
from lightning_lowprec.conversion.matmuls import STACKED, Matmul, is_conv1d, matmuls, other_products
from lightning_lowprec.conversion.name_formats import NO_GROUPED_PRODUCT
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.plan_table import PlanRow, runs_in
from lightning_lowprec.conversion.recipe_map import FLOAT32, NO_PATTERN, LayerRecipe, RecipeMap
from lightning_lowprec.conversion.selection import no_multiple

NOT_CALLED: Final = "not called in the first training forward"
"""Why a layer that converted counts as kept."""


@dataclass(frozen=True, repr=False)
class Plan:
    """The rows of all weights of one model."""

    rows: tuple[PlanRow, ...]
    """The linear layers, and other layers that do the work of a Linear."""
    others: tuple[PlanRow, ...] = ()
    """The weights of convolutions, recurrent layers and ``nn.MultiheadAttention.in_proj``, which never convert."""
    recipes: Mapping[str, LayerRecipe] = field(default_factory=dict, hash=False)
    """With recipes per layer, the recipe of every weight that converts, by fqn."""
    format: str = "FP8"
    """The format of the weights that convert, in words."""

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

    @property
    def all_rows(self) -> tuple[PlanRow, ...]:
        """All rows, linear layers first."""
        return self.rows + self.others

    def without(self, fqns: Collection[str]) -> Plan:
        """Return a plan in which these converted layers, which the model does not call, count as kept."""
        rows = [
            replace(row, kept_because=NOT_CALLED, recipe=None) if row.fqn in fqns and not row.kept_because else row
            for row in self.rows
        ]
        recipes = {fqn: recipe for fqn, recipe in self.recipes.items() if fqn not in fqns}
        return replace(self, rows=tuple(rows), recipes=recipes) if fqns else self

    def summary(self) -> str:
        """Return one line: ``converted 24 of 25 linear layers, kept 1 in bf16: output head (by name) ('lm_head')``.

        Other weights that tokens are multiplied with follow: ``; 8 Conv2d do not run in FP8``.
        """
        kinds = Counter(kind for kind, _ in {(row.kind, row.fqn.rpartition(".")[0]) for row in self.others})
        if not kinds:
            return self._of_linears()
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        return f"{self._of_linears()}; {counts} do not run in {self.format}"

    def _of_linears(self) -> str:
        text = f"converted {len(self.converted)} of {len(self.rows)} linear layers"
        if padded := [row for row in self.rows if row.padded_to and row.kept_because is None]:
            wide = sum(math.prod(row.padded_to or ()) for row in padded)
            more = wide / sum(row.in_features * row.out_features for row in padded) - 1
            text += f" ({len(padded)} of them padded with zeros: {more:.1%} more FLOPs in these)"
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
        dtypes = [row.runs_in for row in kept if row.runs_in not in (None, FLOAT32)]  # the reason names fp32
        share = "" if len(dtypes) == len(kept) else f", {len(dtypes)} of them"
        return f"{text}, kept {len(kept)}{f'{share} in {dtypes[0]}' if dtypes else ''}: {'; '.join(parts)}"

    def __str__(self) -> str:
        return plan_table.as_text([(row.fqn, row) for row in self.all_rows], self.format)

    def __repr__(self) -> str:
        return f"{self.summary()}\n{plan_table.as_text(plan_table.grouped(self.all_rows), self.format)}"

    def _repr_html_(self) -> str:
        """Show the same in a notebook, with the expected gains."""
        return plan_table.as_html(self.summary(), self.all_rows, self.format)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a precision asks of a plan, beside the user's choices of layers."""

    recipe: Recipe | RecipeMap = "tensorwise"
    """The recipe whose break-even points and gains are used, or recipes per layer."""
    alignment: int = selection.FEATURE_ALIGNMENT
    """Features must be multiples of this number."""
    alignments: Mapping[str, int] = field(default_factory=dict)
    """For recipes per layer that need more: by name of the recipe, the number."""
    converted_class: type[nn.Module] | None = None
    """The class that an earlier plan gave to Linears; such a layer gets the row of a Linear."""
    stores_codes: bool = False
    """Weights become parameters of codes, so a weight that a hook computes at each forward is kept."""
    conv1d: bool = True
    """Whether ``Conv1D`` of transformers can convert, whose weight is [in, out]."""
    pads: bool | None = None
    """Whether features that are no multiples of ``alignment`` are padded; None: the backend cannot."""
    experts: str | None = NO_GROUPED_PRODUCT
    """Why stacked experts stay in high precision; None: they convert."""
    base: str = "bf16"
    """The dtype of everything that does not convert."""
    head: str = "bf16"
    """The option ``head`` of the precision."""
    format: str = "FP8"
    """The format of the weights that convert, in words."""


def make_plan(model: nn.Module, options: LayerOptions | None = None, request: PlanRequest | None = None) -> Plan:
    """Return the plan for ``model``. Read names, shapes and dtypes only: a model on the meta device works.

    Args:
        model: any module, also a single Linear.
        options: the user's choices beside the built-in rules.
        request: what the precision asks for; None: what tensorwise FP8 does.

    Raises:
        ValueError: a name or pattern matches no Linear, or the options ask for blocks in a model without blocks.
    """
    options, request = options or LayerOptions(), request or PlanRequest()
    recipe, pads, alignment = request.recipe, request.pads, request.alignment
    built_in, by_user = selection.built_in(model), selection.by_user(model, options)
    reasons = (built_in if options.only is None else {}) | by_user | dict(selection.uncalled(model))
    products = []
    for matmul, module in matmuls(model):
        multiple = 1 if pads and matmul.kind != STACKED else alignment
        reason = selection.unsupported(matmul, module, multiple, request.converted_class, request.experts)
        products.append((matmul, module, reason or reasons.get(matmul.fqn) or _kept_by(options, module, request)))
    if isinstance(recipe, RecipeMap):
        recipe.check({matmul.fqn: reason for matmul, _, reason in products})
    rows, recipes = [], {}
    for matmul, module, reason in products:
        layer_recipe, reason = _from_map(recipe, matmul, reason, 1 if pads else alignment, request.alignments)
        gain = _gain(recipe if layer_recipe is None else layer_recipe.name, matmul, options)
        if reason is None and _too_small(gain, options.threshold):
            reason = f"too small to gain (below {options.threshold:g}x)"
        if reason is None and layer_recipe is not None:
            recipes[matmul.fqn] = layer_recipe
        dtype = (
            None
            if reason is None
            else runs_in(matmul, module, built_in.get(matmul.fqn, ""), request.base, request.head)
        )
        dtype = FLOAT32 if layer_recipe is not None and layer_recipe.name == FLOAT32 else dtype
        row = replace(_row(matmul, module, reason, layer_recipe, gain), runs_in=dtype)
        rows.append(row if pads is None else replace(row, padded_to=_padded(row, alignment)))
    return Plan(tuple(rows), _others(model, request.base), recipes, request.format)


def _others(model: nn.Module, base: str) -> tuple[PlanRow, ...]:
    """Return the rows of weights that never convert."""
    rows = [_row(m, module, f"no Linear ({m.kind})", None, None) for m, module in other_products(model)]
    return tuple(replace(row, runs_in=base) for row in rows)


def _padded(row: PlanRow, alignment: int) -> tuple[int, int] | None:
    """Return the sizes to which a layer is padded, or could be; None: its sizes fit, or another reason keeps it."""
    sizes = row.in_features, row.out_features
    padded = sizes[0] + -sizes[0] % alignment, sizes[1] + -sizes[1] % alignment
    other = row.kind == STACKED or row.kept_because not in (None, no_multiple(alignment))
    return None if other or padded == sizes else padded


def _row(matmul: Matmul, module: nn.Module, reason: str | None, own: LayerRecipe | None, gain: float | None) -> PlanRow:
    words = str(own) if own is not None and (reason is None or own.name == FLOAT32) else None
    return PlanRow(**asdict(matmul), kept_because=reason, gain=gain, trains=_trains(module), recipe=words)


def _kept_by(options: LayerOptions, module: nn.Module, request: PlanRequest) -> str | None:
    if is_conv1d(module) and not request.conv1d:
        return "no Linear (Conv1D)"
    computed = selection.computed_weight(module) if request.stores_codes else None
    return computed or ("frozen" if options.frozen == "keep" and not _trains(module) else None)


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _from_map(
    recipes: str | RecipeMap, matmul: Matmul, reason: str | None, alignment: int, alignments: Mapping[str, int]
) -> tuple[LayerRecipe | None, str | None]:
    """Return the recipe of a weight, if there is a map that has one, and the reason if the weight is kept."""
    match = None if isinstance(recipes, str) else recipes.of_layer(matmul.fqn)
    if match is not None and match[1].name == FLOAT32:
        return match[1], f"'fp32' in `recipe` ({match[0]!r})"
    if reason is not None or isinstance(recipes, str):
        return None, reason
    if match is None:
        return None, NO_PATTERN
    pattern, recipe = match
    if recipe.is_kept:
        return None, f"'bf16' in `recipe` ({pattern!r})"
    multiple = alignments.get(recipe.name or "", alignment)
    fits = matmul.in_features % multiple == 0 and matmul.out_features % multiple == 0
    return recipe, None if fits else no_multiple(multiple)


def _gain(recipe: str | RecipeMap | None, matmul: Matmul, options: LayerOptions) -> float | None:
    name = recipe.names[0] if isinstance(recipe, RecipeMap) else recipe
    return expected_gain(_known(name), matmul.in_features, matmul.out_features, options.tokens or DEFAULT_TOKENS)


def _known(recipe: object) -> Recipe:
    """Return the recipe if there are figures for its gains, else the recipe that is nearest."""
    names: tuple[Recipe, ...] = get_args(Recipe)
    return next((name for name in names if name == recipe), "tensorwise")


def _too_small(gain: float | None, threshold: float | None) -> bool:
    if threshold is None:
        return False
    return threshold >= 1.0 if gain is None else gain < threshold
