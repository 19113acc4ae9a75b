"""The plan: for every Linear of a model, whether it converts, and why not. A plugin applies exactly this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_lowprec.layers import selection


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One Linear."""

    fqn: str
    """Its name in the model; ``""`` if the model is the Linear."""
    in_features: int
    out_features: int
    kept: str | None
    """The reason why it stays in high precision; None if it converts."""


@dataclass(frozen=True)
class Plan:
    """What conversion does to a model: a value that can be printed and compared."""

    rows: tuple[PlanRow, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """The fqns that convert, in the model's order."""
        return tuple(row.fqn for row in self.rows if row.kept is None)

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
        """A table, one line per Linear."""
        if not self.rows:
            return "(the model has no Linear)"
        width = max(len(row.fqn) for row in self.rows)
        lines = []
        for row in self.rows:
            shape = f"{row.in_features} -> {row.out_features}"
            lines.append(f"{row.fqn:<{width}}  {shape:>16}  {'FP8' if row.kept is None else 'kept: ' + row.kept}")
        return "\n".join(lines)


def make_plan(model: nn.Module, *, keep: Sequence[str] = ()) -> Plan:
    """The plan for ``model``. Reads names, shapes and dtypes only: a model on the meta device will do.

    Args:
        model: any module; a root Linear is a row of its own.
        keep: fqns, parts of fqns, or patterns that stay in high precision beside the built-in rules.

    Raises:
        ValueError: a ``keep`` that matches no Linear.
    """
    by_user = selection.kept_by_user(model, keep)
    heads = selection.output_heads(model)
    rows = []
    for fqn, linear in selection.linears(model).items():
        reason = selection.unsupported(linear) or by_user.get(fqn) or heads.get(fqn)
        rows.append(PlanRow(fqn=fqn, in_features=linear.in_features, out_features=linear.out_features, kept=reason))
    return Plan(tuple(rows))
