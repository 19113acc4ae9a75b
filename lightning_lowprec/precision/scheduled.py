"""A precision that can follow a schedule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_lowprec.precision.base import LowPrecision


class Scheduled(LowPrecision):
    """Base of the plugins whose layers can change their precision during a run."""

    @abstractmethod
    def set_schedule(self, schedule: Sequence[Mapping[str, Any]] | None) -> None:
        """Follow a schedule, as the option ``schedule`` does; call this before a module is set up."""

    def set_step(self, step: int, total: int | None = None) -> None:
        """Fabric, with a ``schedule``: say before each optimizer step which step comes.

        Args:
            step: the number of optimizer steps so far, from 0.
            total: the number of optimizer steps of the run, for a schedule with fractions.

        Raises:
            RuntimeError: there is no schedule, or the Trainer runs the plugin.
            ValueError: a number is not valid, or ``total`` is missing.
        """
        if self.phases is None:
            raise RuntimeError(f"`set_step` needs a schedule: `{type(self).__name__}(schedule=[...])`.")
        self.phases.set_step(self, step, total)
