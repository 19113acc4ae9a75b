"""The plan of a model: every weight that is multiplied with the tokens, converted or kept with a reason.

A plan is a plain value: it prints as a table, and two plans can be compared. Making a plan touches no weight, so a
model on the meta device works. A plugin applies exactly its plan. Rows that differ in block numbers only are one line
of a table, so that a model of 1,000 layers stays readable.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final

import torch
from torch import nn

from lightning_lowprec.conversion import matmuls, selection
from lightning_lowprec.conversion.backends import PlanRequest
from lightning_lowprec.conversion.experts import is_stack
from lightning_lowprec.conversion.in_place import own_class
from lightning_lowprec.conversion.name_formats import NO_GROUPED_PRODUCT
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.recipe_map import FLOAT32, NO_PATTERN, LayerRecipe, RecipeMap
from lightning_lowprec.conversion.selection import no_multiple
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.products.formats import FORMATS

NOT_CALLED: Final = "not called in the first training forward"
"""Why a layer that converted counts as kept."""
IN_METRIC: Final = "inside of a torchmetrics.Metric"
_MAYBE_FLOAT32: Final = ("router", "gate beside experts")
"""Layers that many models run in float32, outside of autocast, as ``selection.built_in`` calls them."""


@dataclass(frozen=True, kw_only=True)
class PlanRow(matmuls.Matmul):
    """One weight of the model, and whether the weight converts."""

    kept_because: str | None
    """The reason why the weight stays in high precision; None: the weight converts."""
    gain: float | None
    """Expected speed of FP8 over bf16 for this shape (see ``expected_gain``); None: slower than bf16."""
    trains: bool
    """Whether the weight has a gradient: a frozen weight skips the GEMM of the weight gradient."""
    recipe: str | None = None
    """With recipes per layer, the recipe of a weight that converts, in words; None: one recipe for all."""
    padded_to: tuple[int, int] | None = None
    """In and out features with the zeros that ``pad_inner_dim`` appends, whether on or not; None: it appends none."""
    stored_as_codes: bool = False
    """Whether the weight is stored as codes alone: it is frozen, and converts under ``frozen="codes"``."""
    runs_in: str | None = None
    """The dtype in which a kept weight multiplies: ``"bf16"``; None: the weight converts, or the model decides."""

    @property
    def kept(self) -> str:
        """The reason and the dtype of a kept weight: ``kept: output head (by name), bf16``."""
        text = f"kept: {self.kept_because}{f', {self.runs_in}' if self.runs_in else ''}"
        return f"{text} (`pad_inner_dim=True`: {self.padding})" if self.padded_to else text

    @property
    def padding(self) -> str:
        """The zeros of ``pad_inner_dim`` and their cost in words: ``padded to 304 -> 304, 2.7% more FLOPs``."""
        if self.padded_to is None:
            return ""
        wide, high = self.padded_to
        more = wide * high / (self.in_features * self.out_features) - 1
        return f"padded to {wide} -> {high}, {more:.1%} more FLOPs"

    @property
    def shape(self) -> str:
        """The shape in words: ``4096 -> 11008``, of stacked experts ``4096 -> 11008 x 8``."""
        return f"{self.in_features} -> {self.out_features}" + (f" x {self.stored}" if self.stored > 1 else "")


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
    norms: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    """Where norms convert too, by fqn: the reason why a norm stays; None if the norm converts."""

    @property
    def converted(self) -> tuple[str, ...]:
        """The fqns that convert, in the model's order."""
        return tuple(row.fqn for row in self.rows if row.kept_because is None)

    @property
    def linears(self) -> tuple[str, ...]:
        """The fqns of the layers that convert."""
        return tuple(row.fqn for row in self.rows if row.kept_because is None and row.kind != matmuls.STACKED)

    @property
    def stacked(self) -> tuple[str, ...]:
        """The fqns of the Parameters of stacked experts that convert."""
        return tuple(row.fqn for row in self.rows if row.kept_because is None and row.kind == matmuls.STACKED)

    def below_break_even(self) -> tuple[PlanRow, ...]:
        """Return the converted rows that FP8 is expected to slow down."""
        return tuple(row for row in self.rows if row.kept_because is None and row.gain is None)

    @property
    def all_rows(self) -> tuple[PlanRow, ...]:
        """All rows, linear layers first."""
        return self.rows + self.others

    def without(self, fqns: Collection[str]) -> "Plan":
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
        text = self._of_linears()
        kinds = Counter(kind for kind, _ in {(row.kind, row.fqn.rpartition(".")[0]) for row in self.others})
        if kinds:
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            text += f"; {counts} do not run in {self.format}"
        if self.norms:
            kept = [f"{fqn!r} {reason}" for fqn, reason in self.norms.items() if reason is not None]
            more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
            text += f"; {len(self.norms) - len(kept)} of {len(self.norms)} norms"
            text += f" (kept: {kept[0]}{more})" if kept else ""
        return text

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
        return as_text([(row.fqn, row) for row in self.all_rows], self.format)

    def __repr__(self) -> str:
        return f"{self.summary()}\n{as_text(grouped(self.all_rows), self.format)}"


def make_plan(model: nn.Module, options: LayerOptions | None = None, request: PlanRequest | None = None) -> Plan:
    """Return the plan for ``model``, which may be a single Linear, or on the meta device.

    ``options`` are the user's choices beside the built-in rules; ``request`` None is what tensorwise FP8 asks for.

    Raises:
        ValueError: a name or pattern matches no Linear, or the options ask for blocks in a model without blocks.
    """
    options, request = options or LayerOptions(), request or PlanRequest()
    if options.frozen == "codes" and not request.frozen_codes:
        raise ValueError(
            "`frozen='codes'` is not possible with this precision or recipe. Use `FP8TorchAO` with 'tensorwise' or"
            " 'block' ('fp8-hybrid', 'fp8-e4m3', 'fp8-block'), or `frozen='convert'`."
        )
    recipes = None if isinstance(request.recipe, str) else request.recipe
    one_recipe = request.recipe if isinstance(request.recipe, str) else request.recipe.names[0]
    built_in, by_user = selection.built_in(model), selection.by_user(model, options)
    reasons = (built_in if options.only is None else {}) | by_user | dict(selection.uncalled(model))
    products = []
    in_metrics = set(selection.in_metrics(model).values())
    for matmul, module in matmuls.matmuls(model):
        multiple = 1 if request.pads and matmul.kind != matmuls.STACKED else request.alignment
        reason = selection.unsupported(matmul, module, multiple, request.converted_class, request.experts)
        reason = IN_METRIC if module in in_metrics else reason
        chosen = reasons.get(matmul.fqn) or _kept_by(options, matmul, module, request)
        products.append((matmul, module, reason or chosen, chosen is None))
    if recipes is not None:
        recipes.check({matmul.fqn: reason for matmul, _, reason, _ in products})
    rows = []
    recipe_of: dict[str, LayerRecipe] = {}
    for matmul, module, reason, may_convert in products:
        recipe = None
        if recipes is not None:
            recipe, reason = _of_map(recipes, matmul, reason)
        name = one_recipe if recipe is None else recipe.name
        in_float32 = recipe is not None and recipe.name == FLOAT32
        may_pad = request.pads is not None and may_convert
        if reason is None and recipe is not None:
            recipe_of[matmul.fqn] = recipe
        row = PlanRow(
            **asdict(matmul),
            kept_because=reason,
            gain=matmuls.expected_gain(name, matmul.in_features, matmul.out_features),
            trains=_trains(matmul, module),
            stored_as_codes=reason is None and _stores_codes(options, matmul, module),
            recipe=str(recipe) if recipe is not None and (reason is None or in_float32) else None,
            padded_to=_padded(matmul, reason, request.alignment) if may_pad else None,
            runs_in=FLOAT32 if in_float32 else _runs_in(matmul, module, reason, built_in, request),
        )
        rows.append(row)
    others = []
    for matmul, module in matmuls.other_products(model):
        reason = IN_METRIC if module in in_metrics else f"no Linear ({matmul.kind})"
        dtype = None if module in in_metrics else _dtype(module, request)
        trains = _trains(matmul, module)
        others.append(PlanRow(**asdict(matmul), trains=trains, kept_because=reason, gain=None, runs_in=dtype))
    return Plan(tuple(rows), tuple(others), recipe_of, request.format)


def _padded(matmul: matmuls.Matmul, reason: str | None, alignment: int) -> tuple[int, int] | None:
    """Return the sizes to which a layer is padded, or could be; None: its sizes fit, or another reason keeps it."""
    sizes = matmul.in_features, matmul.out_features
    padded = sizes[0] + -sizes[0] % alignment, sizes[1] + -sizes[1] % alignment
    other = matmul.kind == matmuls.STACKED or reason not in (None, no_multiple(alignment))
    return None if other or padded == sizes else padded


def _kept_by(options: LayerOptions, matmul: matmuls.Matmul, module: nn.Module, request: PlanRequest) -> str | None:
    if matmuls.is_conv1d(module) and not request.conv1d:
        return "no Linear (Conv1D)"
    if request.stores_codes and matmuls.is_linear(module) and "weight" not in module._parameters:
        return "its weight is computed at each forward (weight_norm, spectral_norm, pruning)"
    return "frozen" if options.frozen == "keep" and not _trains(matmul, module) else None


def _trains(matmul: matmuls.Matmul, module: nn.Module) -> bool:
    """Return whether a weight has a gradient, or a parameter from which it is computed at each forward."""
    weight = module._parameters.get(matmul.fqn.rpartition(".")[2], module._parameters.get("weight"))
    return any(p.requires_grad for p in (module.parameters() if weight is None else (weight,)))


def _stores_codes(options: LayerOptions, matmul: matmuls.Matmul, module: nn.Module) -> bool:
    weight = None if matmul.kind == matmuls.STACKED else module._parameters.get("weight")
    return options.frozen == "codes" and weight is not None and not weight.requires_grad


def _of_map(recipes: RecipeMap, matmul: matmuls.Matmul, reason: str | None) -> tuple[LayerRecipe | None, str | None]:
    """Return the recipe of a weight, if the map has one that counts, and the reason if the weight is kept."""
    pattern, recipe = recipes.of_layer(matmul.fqn) or ("", None)
    if recipe is not None and recipe.name == FLOAT32:
        return recipe, f"'fp32' in `recipe` ({pattern!r})"
    if reason is not None:
        return None, reason
    if recipe is None:
        return None, NO_PATTERN
    if recipe.is_kept:
        return None, f"'bf16' in `recipe` ({pattern!r})"
    spec = FORMATS.get(recipe.name)
    if spec is not None and matmul.kind == matmuls.STACKED and not spec.experts:
        return None, NO_GROUPED_PRODUCT
    multiple = 1 if spec is None or spec.features == selection.FEATURE_ALIGNMENT else spec.features  # 16 was checked
    fits = matmul.in_features % multiple == 0 and matmul.out_features % multiple == 0
    return recipe, None if fits else no_multiple(multiple)


def _runs_in(
    matmul: matmuls.Matmul, module: nn.Module, reason: str | None, built_in: Mapping[str, str], request: PlanRequest
) -> str | None:
    """Return ``PlanRow.runs_in``. With ``head="fp8"`` the products of a head differ between training and evaluation."""
    if reason in (None, IN_METRIC):
        return None
    role = built_in.get(matmul.fqn, "")
    if role.startswith("output head") and request.head == FLOAT32:
        return FLOAT32
    if role.startswith(_MAYBE_FLOAT32) or (role.startswith("output head") and request.head == "fp8"):
        return None
    if matmul.kind == "Linear":
        follows = own_class(module).forward is nn.Linear.forward and "forward" not in vars(module)
    else:
        follows = is_stack(module) if matmul.kind == matmuls.STACKED else matmul.kind == matmuls.CONV1D
    return _dtype(module, request) if follows else None


def _dtype(module: nn.Module, request: PlanRequest) -> str | None:
    """Return the dtype in which a kept layer multiplies; None: its own, as autocast casts no float64 and no complex."""
    cast = all(p.dtype in (torch.float32, *HALF_DTYPES) for p in module.parameters(recurse=False))
    return request.base if cast else None


# ---- tables


def grouped(rows: Sequence[PlanRow]) -> list[tuple[str, PlanRow]]:
    """Join rows that differ in block numbers only: (how many and the fqn with ``*``, one of the rows)."""
    groups: dict[tuple[object, ...], list[PlanRow]] = {}
    for row in rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", row.fqn)
        key = pattern, row.in_features, row.out_features, row.kept_because, row.trains, row.recipe
        groups.setdefault(key, []).append(row)
    return [(f"{len(same)} x {key[0]}" if len(same) > 1 else same[0].fqn, same[0]) for key, same in groups.items()]


def verdict(row: PlanRow, format: str) -> str:
    """Return the format or the reason of a row, without the expected gain."""
    if row.kept_because is not None:
        return row.kept
    said = format if row.recipe is None else f"{format} ({row.recipe})"
    said = f"{said}, stored as codes" if row.stored_as_codes else said
    return f"{said}, {row.padding}" if row.padded_to else said


def verdict_with_gain(row: PlanRow, format: str) -> str:
    """Return the format and the expected gain of a row, or the reason why the weight is kept."""
    said = verdict(row, format)
    if row.kept_because is not None or format != "FP8":
        return said
    return f"{said}, slower than bf16" if row.gain is None else f"{said}, about {row.gain:.2f}x"


def as_text(rows: Sequence[tuple[str, PlanRow]], format: str) -> str:
    """Return one aligned line per (name, row)."""
    if not rows:
        return "(the model has no Linear)"
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {row.shape:>16}  {verdict(row, format)}" for name, row in rows)
