"""Recipes per layer: an ordered mapping of patterns to recipes, in which the first pattern that matches wins.

    {"blocks.0.*": "bf16", "*.gate": "fp32", "*.mlp.*": "tensorwise", "*.o_proj": "rowwise", "*": {"forward": "bf16"}}

The rules that keep a layer (output heads, routers, adapters, ``keep``, ``only``, layers that cannot convert) come
before the mapping, but not before ``"fp32"``. A layer that no pattern matches is kept; in a map of ``"fp32"`` alone
it has the backend's first recipe. A recipe may leave some of a Linear's three products in high precision,
``{"forward": "bf16"}`` of the first recipe and ``{"recipe": "block", "forward": "bf16"}`` of another:

    forward       output      = input       @ weight.T
    grad_input    grad_input  = grad_output @ weight
    grad_weight   grad_weight = grad_output.T @ input

High precision is written ``"bf16"``, and is the dtype of autocast: bf16, or fp16 with ``base="fp16"``.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal, get_args

from lightning_lowprec.checks import Rule, check_choice
from lightning_lowprec.gone import VALUES, gone

Gemm = Literal["forward", "grad_input", "grad_weight"]
GEMMS: Final[tuple[Gemm, ...]] = get_args(Gemm)
GemmPrecision = Literal["bf16", "fp8"]
InBF16 = frozenset[Gemm]
"""The products that run in high precision; the others run in the precision of the recipe."""
NO_GEMM: Final[InBF16] = frozenset()
ALL_GEMMS: Final[InBF16] = frozenset(GEMMS)
GemmChoices = Annotated[
    Mapping[Gemm | Literal["recipe"], str],
    Rule("a mapping such as {'forward': 'bf16'} (forward, grad_input, grad_weight, recipe)"),
]
HIGH: Final = "bf16"
"""The value of a pattern whose layers are kept."""
FLOAT32: Final = "fp32"
"""The value of a pattern whose layers run in float32, with float32 weights; other rules do not come before it."""
NO_PATTERN: Final = "no pattern of `recipe` matches"
"""The reason of a layer that no pattern matches."""


def in_bf16(choice: Mapping[Gemm, str], field: str) -> InBF16:
    """Return the products that a choice, of some products and ``"bf16"`` or ``"fp8"`` for each, keeps from FP8."""
    if not choice or any(g not in GEMMS or value not in get_args(GemmPrecision) for g, value in choice.items()):
        left = [gone(str(value), VALUES["recipe"]) for value in choice.values()]
        expected = f"expected a mapping of {', '.join(GEMMS)} to 'bf16' or 'fp8'"
        message = f"`{field}={choice!r}` is not valid; {expected}, e.g. {{'forward': 'bf16'}}."
        raise ValueError(" ".join(filter(None, [message, *dict.fromkeys(left)])))
    return frozenset(gemm for gemm, precision in choice.items() if precision == "bf16")


def words(gemms: InBF16) -> str:
    """Return the products in words: ``"forward and grad_input in bf16"``, or ``""`` for none."""
    return f"{' and '.join(gemm for gemm in GEMMS if gemm in gemms)} in bf16" if gemms else ""


@dataclass(frozen=True)
class LayerRecipe:
    """The precision of one layer: a recipe, and the products that run in high precision instead."""

    name: str
    """A recipe of the backend, such as ``"rowwise"``, or ``"fp32"``."""
    in_bf16: InBF16 = NO_GEMM

    @classmethod
    def of(cls, value: Any, *, names: Sequence[str], base: str, field: str) -> "LayerRecipe":
        """Return the recipe that a user has written: of ``names``, "bf16", "fp32", or products of ``base``."""
        if value == HIGH:
            return cls(base, ALL_GEMMS)
        if isinstance(value, Mapping):
            name = value.get("recipe", base)
            check_choice(f"{field}['recipe']", name, names)
            return cls(name, in_bf16({k: v for k, v in value.items() if k != "recipe"}, field))
        if value == FLOAT32:
            return cls(FLOAT32, ALL_GEMMS)
        if value not in names:
            expected = f"{', '.join(map(repr, names))}, 'bf16', 'fp32', or a mapping such as {{'forward': 'bf16'}}"
            raise ValueError(f"`{field}={value!r}` is not valid; expected one of: {expected}.")
        return cls(value)

    @property
    def is_kept(self) -> bool:
        """Whether nothing runs in FP8."""
        return self.in_bf16 == ALL_GEMMS

    def __str__(self) -> str:
        if self.name == FLOAT32:
            return FLOAT32
        return ", ".join(filter(None, [self.name, words(self.in_bf16)]))


@dataclass(frozen=True)
class RecipeMap:
    """Patterns and their recipes, in the order in which they are tried."""

    entries: tuple[tuple[str, LayerRecipe], ...]

    @classmethod
    def of(cls, patterns: Mapping[str, object], *, names: Sequence[str], base: str) -> "RecipeMap":
        """Return the map of what a user has written, patterns and values for :meth:`LayerRecipe.of`."""
        if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
            raise ValueError(
                f"`recipe={dict(patterns)!r}` is not valid; expected patterns of fqns with a recipe each, e.g."
                f" {{'*.o_proj': {names[-1]!r}, '*': {names[0]!r}}}."
            )
        recipes = {
            pattern: LayerRecipe.of(value, names=names, base=base, field=f"recipe[{pattern!r}]")
            for pattern, value in patterns.items()
        }
        if all(recipe.name == FLOAT32 for recipe in recipes.values()):
            recipes["*"] = LayerRecipe(base)
        if all(recipe.is_kept for recipe in recipes.values()):
            raise ValueError(
                f"`recipe={dict(patterns)!r}` computes nothing in FP8; give a pattern one of:"
                f" {', '.join(map(repr, names))}, or use `precision='bf16-mixed'`."
            )
        return cls(tuple(recipes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """The recipes of layers that convert, in the order of the map, each once."""
        return tuple(dict.fromkeys(recipe.name for _, recipe in self.entries if not recipe.is_kept))

    @property
    def float32(self) -> tuple[str, ...]:
        """The patterns of layers in float32."""
        return tuple(pattern for pattern, recipe in self.entries if recipe.name == FLOAT32)

    def of_layer(self, fqn: str) -> tuple[str, LayerRecipe] | None:
        """Return the first pattern that matches, and its recipe; None: no pattern matches."""
        return next(((pattern, recipe) for pattern, recipe in self.entries if fnmatchcase(fqn, pattern)), None)

    def check(self, kept: Mapping[str, str | None]) -> None:
        """Raise if a pattern decides nothing: it matches nothing, or only layers that others take or other rules keep.

        ``kept`` has for every weight of the model the reason of another rule that keeps it; None: the map decides.
        """
        for number, (pattern, recipe) in enumerate(self.entries):
            matched = [fqn for fqn in kept if fnmatchcase(fqn, pattern)]
            open_to = [fqn for fqn in matched if kept[fqn] is None]
            earlier = [other for other, _ in self.entries[:number]]
            taken = [fqn for fqn in open_to if any(fnmatchcase(fqn, other) for other in earlier)]
            if len(taken) < len(open_to) or (matched and not open_to and recipe.is_kept):
                continue
            if taken:
                useless = (
                    f"matches only layers that earlier patterns take ({taken[0]!r}), and the first pattern that matches"
                    " wins. Put the pattern before them, or leave it out."
                )
            elif matched:
                useless = (
                    f"matches only layers that other rules keep ({matched[0]!r}: {kept[matched[0]]}), and these come"
                    " before `recipe`. Leave the pattern out, or name the layers that convert with `only=[...]`."
                )
            else:
                useless = (
                    f"matches no linear layer of the model; {nearest_fqns(pattern, kept)}. A pattern matches a whole"
                    " fqn: '*.o_proj', 'blocks.[0-1].*'."
                )
            raise ValueError(f"`recipe[{pattern!r}]` {useless}")


def nearest_fqns(pattern: str, fqns: Collection[str]) -> str:
    """Return the names that are spelled most like a pattern, for messages: ``the nearest are: 'a', 'b' (of 12)``."""
    near = difflib.get_close_matches(pattern, fqns, n=3, cutoff=0.3) or list(fqns)[:3]
    return f"the nearest are: {', '.join(map(repr, near))} (of {len(fqns)})"
