"""The parts by name, the most valuable first."""

from __future__ import annotations

from benchmarks.gpu_lane.item import Part
from benchmarks.gpu_lane.part_accumulation import Accumulation
from benchmarks.gpu_lane.part_convergence import Convergence
from benchmarks.gpu_lane.part_linear import Linears
from benchmarks.gpu_lane.part_memory import Memory
from benchmarks.gpu_lane.part_optimizer import OptimizerSteps
from benchmarks.gpu_lane.part_overhead import Overhead
from benchmarks.gpu_lane.part_smoke import Smoke
from benchmarks.gpu_lane.part_steps import Steps
from benchmarks.gpu_lane.part_tests import Tests

ALL: tuple[Part, ...] = (
    Smoke("smoke"), Linears(), Steps("8b"), Tests(), Steps("1b"), Overhead(), Memory(), OptimizerSteps(),
    Accumulation(), Convergence(), Smoke("smoke-all"),
)  # fmt: skip
PARTS: dict[str, Part] = {part.name: part for part in ALL}
