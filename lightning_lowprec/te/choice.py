"""Which layers become Transformer Engine's: Linears by the plan that all backends share, norms by the same names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import nn

from lightning_lowprec.conversion.matmuls import matmuls
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.plan import Plan, make_plan
from lightning_lowprec.conversion.selection import matches
from lightning_lowprec.te import norms
from lightning_lowprec.te.fusion.report import Fusion


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What conversion does to a model."""

    linears: Plan
    norms: Mapping[str, str | None]
    """By fqn: the reason why a norm stays; None if it converts."""

    fusion: Fusion | None = None
    """What became single calls, where that was asked for."""

    @property
    def converts(self) -> bool:
        """Whether anything runs in FP8."""
        return bool(self.linears.converted or (self.fusion is not None and self.fusion.fused))

    @property
    def converted_norms(self) -> tuple[str, ...]:
        """The fqns of norms that convert."""
        return tuple(fqn for fqn, reason in self.norms.items() if reason is None)

    def summary(self) -> str:
        """One line, as :meth:`Plan.summary`, the norms, and the fusion."""
        text = self.linears.summary() + self._of_norms()
        return text if self.fusion is None else f"{text}; {self.fusion.summary()}"

    def _of_norms(self) -> str:
        if not self.norms:
            return ""
        text = f"; {len(self.converted_norms)} of {len(self.norms)} norms"
        kept = [f"{fqn!r} {reason}" for fqn, reason in self.norms.items() if reason is not None]
        return text + (f" (kept: {kept[0]}{f' and {len(kept) - 1} more' if len(kept) > 1 else ''})" if kept else "")


def choose(model: nn.Module, options: LayerOptions, *, alignment: int, with_norms: bool) -> Choice:
    """The layers of ``model`` that convert.

    Args:
        model: on any device, meta too.
        options: ``keep`` and ``only`` may name norms as well as Linears.
        alignment: what a Linear's features must be multiples of.
        with_norms: whether norms convert at all.

    Raises:
        ValueError: a name or pattern that matches neither a Linear nor a norm.
    """
    reasons = {fqn: norms.reason_to_keep(module) for fqn, module in model.named_modules()} if with_norms else {}
    reasons = {fqn: reason for fqn, reason in reasons.items() if reason != norms.NO_NORM}
    for pattern in options.keep:
        reasons |= {fqn: f"kept by {pattern!r}" for fqn in reasons if matches(pattern, fqn)}
    if options.only is not None:
        chosen = {fqn for pattern in options.only for fqn in reasons if matches(pattern, fqn)}
        reasons |= dict.fromkeys(reasons.keys() - chosen, "not in `only`")
    stacks = [matmul.fqn for matmul in matmuls(model) if matmul.kind == "stacked experts"]
    linears = _for_linears(model, options, [*reasons, *stacks])
    return Choice(linears=make_plan(model, linears, alignment=alignment), norms=reasons)


def _for_linears(model: nn.Module, options: LayerOptions, found: Collection[str]) -> LayerOptions:
    """The options without the patterns that mean only ``found``: a plan raises for one that matches no Linear."""
    fqns = [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)]

    def for_linears(pattern: str) -> bool:
        return any(matches(pattern, fqn) for fqn in fqns) or not any(matches(pattern, fqn) for fqn in found)

    only = None if options.only is None else [pattern for pattern in options.only if for_linears(pattern)]
    return replace(options, keep=[pattern for pattern in options.keep if for_linears(pattern)], only=only)
