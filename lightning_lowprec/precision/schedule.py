"""A schedule: phases of a run, and the matrix products that each phase computes in high precision.

This file says what a schedule is, without torch, for the command line; `phases.py` applies a schedule to layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final, TypedDict, final

from lightning_lowprec.checks import Rule
from lightning_lowprec.conversion.options import Group
from lightning_lowprec.conversion.recipe_map import ALL_GEMMS, InBF16, asked_in_fp8, in_bf16, words

Phases = Annotated[
    Sequence[Mapping[str, Any]], Rule("a list of phases, e.g. [{'until': 0.1, 'gemms': 'bf16'}, {'until': 0.95}, {}]")
]
_KEYS: Final = ("until", "gemms", "keep")
_EPSILON: Final = 1e-9  # 0.29 * 100 is 28.999999999999996


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Group):
    """Options of a schedule.

    Args:
        schedule: phases of the run: ``[{"until": 0.1, "gemms": "bf16"}, {"until": 0.95}, {"gemms": {"forward":
            "bf16"}}]``. ``until`` is where a phase ends: a fraction of the run (a float between 0 and 1) or an
            optimizer step (an integer), which belongs to the next phase already; the last phase has none. ``gemms``:
            ``"bf16"``, or a mapping of ``forward``, ``grad_input`` and ``grad_weight`` to ``"bf16"``; without it layers
            compute as their recipe says. ``keep``: converted layers that run in bf16 in this phase. In Fabric call
            ``plugin.set_step(step, total=N)`` before each step.
    """

    schedule: Phases | None = None


class ScheduleChoices(TypedDict, total=False):
    """The fields of :class:`ScheduleOptions`, for type checkers."""

    schedule: Sequence[Mapping[str, Any]] | None


@final
@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase."""

    until: int | float | None
    """The step that begins the next phase, or the fraction of the run; None: the phase is the last."""
    in_bf16: InBF16
    in_fp8: InBF16
    """The products that the user names as FP8."""
    keep: tuple[str, ...]
    """Names or patterns of layers with all products in high precision."""

    def of_layer(self, fqn: str, matches: Any) -> InBF16:
        """Return the products that the layer ``fqn`` computes in high precision; ``matches(pattern, fqn)``."""
        return ALL_GEMMS if any(matches(pattern, fqn) for pattern in self.keep) else self.in_bf16

    def said(self, high: str, low: str = "FP8") -> str:
        """Return the phase in words; ``high`` is the dtype outside of the format ``low``."""
        gemms = words(self.in_bf16, high) or low
        return f"{gemms}, {', '.join(self.keep)} in {high}" if self.keep else gemms


@final
@dataclass(frozen=True)
class Schedule:
    """The phases of a run."""

    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, phases: Sequence[Mapping[str, Any]]) -> Schedule:
        """Return the schedule that a user has written."""
        if not phases:
            raise ValueError(
                "`schedule=[]` has no phase; expected e.g. [{'until': 0.1, 'gemms': 'bf16'}, {}], or None."
            )
        last = len(phases) - 1
        schedule = cls(tuple(_phase(number, phase, is_last=number == last) for number, phase in enumerate(phases)))
        for kind in (int, float):  # both are compared when the length of the run is known
            _check_order([p.until for p in schedule.phases if isinstance(p.until, kind)], "")
        return schedule

    @property
    def reads_total(self) -> bool:
        """Whether phases begin at fractions of the run."""
        return any(isinstance(phase.until, float) for phase in self.phases)

    def ends(self, total: int | None, *, lenient: bool = False) -> tuple[int, ...]:
        """Return the first step of each phase but the first; without ``total`` only for a schedule without fractions.

        ``lenient`` allows phases without a step (``fast_dev_run``).
        """
        firsts = []
        for phase in self.phases[:-1]:
            assert phase.until is not None
            if isinstance(phase.until, float):
                assert total is not None
                step = phase.until * total
                firsts.append(math.floor(step + _EPSILON))
            else:
                firsts.append(phase.until)
        if not lenient:
            _check_order([0, *firsts], f" in a run of {total} steps")
        return tuple(firsts)

    def check_fp8(self, high: InBF16, given: str) -> None:
        """Raise if a phase names a product as FP8 that ``given``, such as a recipe, computes in high precision."""
        for number, phase in enumerate(self.phases):
            if gemms := phase.in_fp8 & high:
                raise ValueError(
                    f"`schedule[{number}]['gemms']` asks for {min(gemms)!r} in 'fp8', and `{given}` computes it in"
                    " bf16. A schedule moves GEMMs to bf16 and back only. Use another recipe, or leave 'fp8' out."
                )


def _phase(number: int, given: Any, *, is_last: bool) -> Phase:
    field = f"schedule[{number}]"
    if not isinstance(given, Mapping) or not set(given) <= set(_KEYS):
        raise ValueError(f"`{field}={given!r}` is not valid; expected a mapping with some of: {', '.join(_KEYS)}.")
    until, gemms, keep = given.get("until"), given.get("gemms"), given.get("keep", ())
    if is_last and until is not None:
        raise ValueError(
            f"`{field}` is the last phase, which lasts until the end of the run, and has `until={until!r}`. Leave"
            " `until` out, or add a phase."
        )
    fraction, step = isinstance(until, float) and 0 < until < 1, type(until) is int and until >= 1
    if not (is_last or fraction or step):
        raise ValueError(
            f"`{field}['until']={until!r}` is not valid; expected an optimizer step (an integer of at least 1) or a"
            " fraction of the run (a float between 0 and 1, both excluded). Only the last phase has no `until`."
        )
    if isinstance(keep, str) or not isinstance(keep, Sequence) or not all(isinstance(p, str) and p for p in keep):
        raise ValueError(f"`{field}['keep']={keep!r}` is not valid; expected a list of fqns or patterns.")
    products = in_bf16(gemms, f"{field}['gemms']")
    return Phase(until=until, in_bf16=products, in_fp8=asked_in_fp8(gemms), keep=tuple(keep))


def _check_order(ends: Sequence[int | float | None], where: str) -> None:
    for before, after in pairwise(ends):
        if before is not None and after is not None and after <= before:
            raise ValueError(
                f"`schedule` has a phase without a step{where}: it ends at {after}, and the phase before at {before}."
                " Give phases that end one after the other, or train longer."
            )
