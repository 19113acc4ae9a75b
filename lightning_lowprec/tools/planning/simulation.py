"""Simulate a model with few of its equal blocks, and extend the figures to all of them.

Every block adds the same to what lives at any moment of a step: its weights, gradients and state, and its activations
until its backward. So the memory at each moment is a constant plus a number per block. Two depths give both. The
moments are stretches of a step: the forward, the backward before the blocks, of the last block, of those between, of
the first, and the optimizer's step.

Of one rank of ``strategy="fsdp2"``, weights, gradients and state are computed and activations simulated.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final, final

from torch import nn

from lightning_lowprec import names
from lightning_lowprec.conversion.name_suffixes import MASTERS, split
from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.tools.planning.costs import COMPARED, footprints, per_rank
from lightning_lowprec.tools.planning.memory_meter import ACTIVATIONS, STATE, TEMPORARIES, Peaks
from lightning_lowprec.tools.planning.simulated_step import OPTIMIZER, SET_UP, Inputs, Setting, simulate

DEPTHS: Final = (3, 4)
"""Numbers of blocks that are simulated: the first, the last, and one or two between."""
_FIRST, _BETWEEN, _LAST = 0, 1, 2


@dataclass(frozen=True)
class Run:
    """Equal blocks in a row: positions ``start`` to ``start + length - 1`` of the list at ``fqn``."""

    fqn: str
    start: int
    length: int


def longest_run(model: nn.Module) -> Run | None:
    """Return the equal blocks with the most parameters, or None if no list has more of them than are simulated."""
    best, most = None, 0
    for fqn, stack in model.named_modules():
        if not isinstance(stack, nn.ModuleList | nn.Sequential) or len(stack) <= max(DEPTHS):
            continue
        start = 0
        for _, same in groupby(stack, key=_shape):
            blocks = list(same)
            size = sum(p.numel() for block in blocks for p in block.parameters())
            if len(blocks) > max(DEPTHS) and size > most:
                best, most = Run(fqn, start, len(blocks)), size
            start += len(blocks)
    return best


def _shape(block: nn.Module) -> Any:
    children = tuple((fqn, type(module)) for fqn, module in block.named_modules())
    return children, tuple((fqn, p.shape, p.dtype, p.requires_grad) for fqn, p in block.named_parameters())


@final
class Simulator:
    """Simulate settings of one model, on the meta device, which stays as it is; every setting once."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.inputs = inputs
        self.run = longest_run(model)
        self._whole = model
        self._model = model if self.run is None else _cut(model, self.run, max(DEPTHS))
        self._simulated: dict[str, Peaks] = {}

    @property
    def words(self) -> str | None:
        """The blocks that are not simulated, in words, or None."""
        if self.run is None:
            return None
        shown = " and ".join(map(str, DEPTHS))
        return f"extrapolated from {shown} to all {self.run.length} equal blocks of {self.run.fqn!r}"

    def peaks(self, setting: Setting) -> Peaks:
        """Return the peak of every stretch of a step: bytes by category."""
        key = repr(setting)
        if key not in self._simulated:
            self._simulated[key] = self._simulate(setting) if setting.devices == 1 else self._of_one_rank(setting)
        return self._simulated[key]

    def _simulate(self, setting: Setting) -> Peaks:
        run = self.run
        if run is None:
            return simulate(copy.deepcopy(self._model), self.inputs, setting)
        peaks = []
        for depth in DEPTHS:
            model = _cut(self._model, replace(run, length=max(DEPTHS)), depth)
            blocks = [f"{run.fqn}.{run.start + position}.".lstrip(".") for position in range(depth)]
            numbers = dict.fromkeys(blocks, _BETWEEN) | {blocks[0]: _FIRST, blocks[-1]: _LAST}
            peaks.append(simulate(model, self.inputs, setting, blocks=numbers))
        return extended(*peaks, at=DEPTHS, to=run.length)

    def _of_one_rank(self, setting: Setting) -> Peaks:
        """The shards stand under ``state``; gathered weights, and gradients on their way, under ``temporaries``."""
        precision, model = setting.precision, self._whole
        name = names.TABLE.get(precision)
        converts = name is not None and name.backend is not None
        plan = make_plan(model)
        sizes = footprints(model, plan, precision)
        if not converts:
            sizes = sizes[:-1]
        layout = precision if converts or precision in COMPARED else "bf16-mixed"
        ranks = [rank for rank in per_rank(model, plan, sizes, shards=setting.devices) if rank.precision == layout]
        if not ranks:
            raise ValueError(f"`precision={precision!r}` does not run under strategy='fsdp2'.")
        rank = ranks[-1]
        on_one = self.peaks(replace(setting, devices=1, precision=_of_gathered(precision, converts=converts)))
        return {
            stretch: {
                **dict.fromkeys(peak, 0),
                STATE: round(rank.state),
                ACTIVATIONS: peak[ACTIVATIONS],
                TEMPORARIES: peak[TEMPORARIES] // setting.devices
                if stretch == OPTIMIZER
                else peak[TEMPORARIES] + rank.in_flight,
            }
            for stretch, peak in on_one.items()
            if stretch != SET_UP  # shards are set up from the meta device
        }


def _cut(model: nn.Module, run: Run, depth: int) -> nn.Module:
    """Return a copy of the model with ``depth`` blocks of the run."""
    cut = slice(run.start + depth, run.start + run.length)
    stack: Any = model.get_submodule(run.fqn)
    left_out = {id(block): None for block in stack[cut]}
    copied = copy.deepcopy(model, left_out)  # blocks that are left out are not copied
    kept: Any = copied.get_submodule(run.fqn)
    del kept[cut]
    return copied


def extended(few: Peaks, more: Peaks, *, at: tuple[int, int], to: int) -> Peaks:
    """Return the line through two depths, at a third one, by stretch and category."""
    steps = (to - at[0]) / (at[1] - at[0])

    def line(start: Mapping[str, int], end: Mapping[str, int]) -> dict[str, int]:
        return {name: round(start[name] + steps * (end[name] - start[name])) for name in start}

    return {stretch: line(few[stretch], more[stretch]) for stretch in few if stretch in more}


def _of_gathered(precision: str, *, converts: bool) -> str:
    """Return the name whose weights have on one GPU the dtype in which FSDP2 gathers them: no casts are kept."""
    if precision in ("32-true", "bf16-true"):
        return precision
    stem, suffix = split(precision)
    if not converts:
        return "bf16-sr"
    return f"{stem if suffix in MASTERS else precision}-sr"
