"""Callbacks of the Trainer that steer or watch low precision."""

from __future__ import annotations

from lightning_lowprec.callbacks.schedule import PrecisionSchedule

__all__ = ["PrecisionSchedule"]
