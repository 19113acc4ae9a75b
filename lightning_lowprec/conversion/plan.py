"""The plan: for every weight that is multiplied with the tokens, whether it converts, and why not.

A plan is a value: it is made on a meta model without touching weights, prints as a table, compares, and travels as
JSON. A plugin applies exactly what its plan says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from lightning_lowprec.conversion import selection
from lightning_lowprec.conversion.gains import DEFAULT_TOKENS, Recipe, expected_gain
from lightning_lowprec.conversion.matmuls import Matmul, matmuls
from lightning_lowprec.conversion.options import LayerOptions


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One weight."""

    fqn: str
    """Its module's name in the model (stacked experts: the parameter's); ``""`` if the model is the Linear."""
    kind: str
    """``"Linear"``, or what else multiplies with the tokens."""
    in_features: int
    out_features: int
    kept: str | None
    """The reason why it stays in high precision; None if it converts."""
    gain: float | None
    """Expected speed of FP8 over bf16 for this shape (see ``gains``); None: slower than bf16."""
    trains: bool
    """Whether its weight has gradients: a frozen one skips the weight gradient's GEMM."""
    per_token: float
    """Products of this shape per token; above 1 for stacked experts."""
    stored: int
    """Weights of this shape; above 1 for stacked experts."""

    @property
    def slower(self) -> bool:
        """Whether FP8 is expected to lose against bf16 at this shape."""
        return self.gain is None or self.gain < 1.0


@dataclass(frozen=True)
class Plan:
    """What conversion does to a model."""

    rows: tuple[PlanRow, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """The fqns that convert, in the model's order."""
        return tuple(row.fqn for row in self.rows if row.kept is None)

    def below_break_even(self) -> tuple[PlanRow, ...]:
        """The converted rows that FP8 is expected to slow down."""
        return tuple(row for row in self.rows if row.kept is None and row.slower)

    def summary(self) -> str:
        """One line: ``converted 24 of 25 linear layers, kept 1: output head (by name) ('lm_head')``."""
        text = f"converted {len(self.converted)} of {len(self.rows)} linear layers"
        kept = [row for row in self.rows if row.kept is not None]
        if not kept:
            return text
        reasons = Counter(row.kept for row in kept)
        first = {reason: next(row.fqn for row in kept if row.kept == reason) for reason in reasons}
        parts = [
            f"{reason} ({first[reason]!r}{f' and {n - 1} more' if n > 1 else ''})" for reason, n in reasons.items()
        ]
        return f"{text}, kept {len(kept)}: {'; '.join(parts)}"

    def __str__(self) -> str:
        """A table, one line per weight."""
        if not self.rows:
            return "(the model has no Linear)"
        width = max(len(row.fqn) for row in self.rows)
        lines = []
        for row in self.rows:
            shape = f"{row.in_features} -> {row.out_features}" + (f" x {row.stored}" if row.stored > 1 else "")
            lines.append(f"{row.fqn:<{width}}  {shape:>16}  {'FP8' if row.kept is None else 'kept: ' + row.kept}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"rows": [asdict(row) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The plan that ``to_dict`` wrote."""
        return cls(tuple(PlanRow(**row) for row in data["rows"]))


def make_plan(
    model: nn.Module,
    options: LayerOptions | None = None,
    *,
    recipe: Recipe = "tensorwise",
    alignment: int = selection.FEATURE_ALIGNMENT,
    converted_class: type[nn.Module] | None = None,
) -> Plan:
    """The plan for ``model``. Reads names, shapes and dtypes only: a model on the meta device will do.

    Args:
        model: any module; a root Linear is a row of its own.
        options: the user's wishes beside the built-in rules.
        recipe: whose break-even points and gains are meant.
        alignment: what features must be multiples of.
        converted_class: the class that an earlier plan gave to Linears; such a layer gets the row of a Linear.

    Raises:
        ValueError: a name or pattern that matches no Linear, or blocks that are asked for and not there.
    """
    options = options or LayerOptions()
    reasons = selection.by_user(model, options)
    if options.only is None:
        reasons = selection.built_in(model) | reasons
    rows = (_row(matmul, reasons, options, recipe, alignment, converted_class) for matmul in matmuls(model))
    return Plan(tuple(rows))


def _row(
    matmul: Matmul,
    reasons: dict[str, str],
    options: LayerOptions,
    recipe: Recipe,
    alignment: int,
    converted_class: type[nn.Module] | None,
) -> PlanRow:
    gain = expected_gain(recipe, matmul.in_features, matmul.out_features, options.tokens or DEFAULT_TOKENS)
    trains = any(p.requires_grad for p in matmul.module.parameters(recurse=False))
    reason = selection.unsupported(matmul, alignment, converted_class) or reasons.get(matmul.fqn)
    if reason is None and options.frozen == "keep" and not trains:
        reason = "frozen"
    if reason is None and _too_small(gain, options.threshold):
        reason = f"too small to gain (below {options.threshold:g}x)"
    return PlanRow(
        fqn=matmul.fqn,
        kind=matmul.kind,
        in_features=matmul.in_features,
        out_features=matmul.out_features,
        kept=reason,
        gain=gain,
        trains=trains,
        per_token=matmul.per_token,
        stored=matmul.stored,
    )


def _too_small(gain: float | None, threshold: float | None) -> bool:
    if threshold is None:
        return False
    return threshold >= 1.0 if gain is None else gain < threshold
