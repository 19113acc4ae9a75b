"""The parts by name, the most valuable first."""

from __future__ import annotations

from benchmarks.gpu_lane.item import Part
from benchmarks.gpu_lane.part_linear import Linears
from benchmarks.gpu_lane.part_loss import Losses
from benchmarks.gpu_lane.part_memory import Memory
from benchmarks.gpu_lane.part_steps import Steps

PARTS: dict[str, Part] = {part.name: part for part in (Steps(), Linears(), Losses(), Memory())}
