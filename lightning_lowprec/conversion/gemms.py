"""Name the three matrix products of a Linear, and say which of them run in high precision.

    forward       output      = input       @ weight.T
    grad_input    grad_input  = grad_output @ weight
    grad_weight   grad_weight = grad_output.T @ input

High precision is written ``"bf16"``, and is the dtype of autocast: bf16, or fp16 with ``base="fp16"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args

from lightning_lowprec.checks import Rule

Gemm = Literal["forward", "grad_input", "grad_weight"]
GEMMS: Final[tuple[Gemm, ...]] = get_args(Gemm)
GemmPrecision = Literal["bf16", "fp8"]
InBF16 = frozenset[Gemm]
"""The products that run in high precision; the others run in the precision of the recipe."""
NO_GEMM: Final[InBF16] = frozenset()
ALL_GEMMS: Final[InBF16] = frozenset(GEMMS)
GemmChoices = Annotated[
    Mapping[Gemm, GemmPrecision], Rule("a mapping such as {'forward': 'bf16'} (forward, grad_input, grad_weight)")
]


def in_bf16(choice: Any, field: str) -> InBF16:
    """Return the products that a choice computes in high precision.

    ``choice`` is ``"bf16"`` (all), ``"fp8"`` or None (none), or a mapping of some products to ``"bf16"`` and ``"fp8"``;
    a product that the mapping does not name runs in the precision of the recipe.
    """
    if choice is None or choice == "fp8":
        return NO_GEMM
    if choice == "bf16":
        return ALL_GEMMS
    valid = isinstance(choice, Mapping) and choice and all(_is_valid(*item) for item in choice.items())
    if not valid:
        raise ValueError(
            f"`{field}={choice!r}` is not valid; expected 'bf16', 'fp8', or a mapping of {', '.join(GEMMS)} to 'bf16'"
            " or 'fp8', e.g. {'forward': 'bf16'}."
        )
    return frozenset(gemm for gemm, precision in choice.items() if precision == "bf16")


def asked_in_fp8(choice: Any) -> InBF16:
    """Return the products that a choice, which :func:`in_bf16` accepts, names as FP8."""
    if choice == "fp8":
        return ALL_GEMMS
    return frozenset(g for g, p in choice.items() if p == "fp8") if isinstance(choice, Mapping) else NO_GEMM


def _is_valid(gemm: object, precision: object) -> bool:
    return gemm in GEMMS and precision in get_args(GemmPrecision)


def words(gemms: InBF16, high: str = "bf16") -> str:
    """Return the products in words: ``"all GEMMs in bf16"``, ``"forward in bf16"``, or ``""`` for none."""
    if gemms == ALL_GEMMS:
        return f"all GEMMs in {high}"
    return f"{' and '.join(gemm for gemm in GEMMS if gemm in gemms)} in {high}" if gemms else ""
