"""What fusion did to a model, place by place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

Kind = Literal["norm+linear", "norm+MLP", "grouped experts"]


@dataclass(frozen=True, kw_only=True)
class FusionRow:
    """One site."""

    fqn: str
    """The norm's, or the experts'."""
    kind: Kind
    linears: tuple[str, ...]
    """Fqns of the Linears (experts: of the Parameters) that are computed here."""
    kept: str | None = None
    """Why it stays unfused; None if it is fused."""
    note: str | None = None
    """Why it is fused with less than it might be: no whole MLP."""


@dataclass(frozen=True)
class Fusion:
    """What ``fuse`` did."""

    rows: tuple[FusionRow, ...]

    @property
    def fused(self) -> tuple[FusionRow, ...]:
        """The rows that are fused."""
        return tuple(row for row in self.rows if row.kept is None)

    @property
    def handled(self) -> frozenset[str]:
        """Fqns of all norms, Linears and experts' Parameters that fused calls compute: nothing else converts them."""
        return frozenset(fqn for row in self.fused for fqn in (row.fqn, *row.linears))

    def summary(self) -> str:
        """One line: ``fused 64 of 65 places (32 norm+linear, 32 norm+MLP), kept 1: ... ('model.layers.0...')``."""
        if not self.rows:
            return "fused nothing: no structure that fusion knows"
        kinds = Counter(row.kind for row in self.fused)
        text = f"fused {len(self.fused)} of {len(self.rows)} places"
        if kinds:
            text += f" ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})"
        remarks = [(f"kept {{}}: {row.kept}", row.fqn) for row in self.rows if row.kept is not None]
        remarks += [(f"{{}} without the MLP: {row.note}", row.fqn) for row in self.fused if row.note]
        for remark, count in Counter(remark for remark, _ in remarks).items():
            fqn = next(fqn for other, fqn in remarks if other == remark)
            text += f"; {remark.format(count)} ({fqn!r}{f' and {count - 1} more' if count > 1 else ''})"
        return text
