"""Simulate a model with few of its equal blocks, and extend the figures to all of them.

Every block adds the same to what lives at a moment of a step: its weights, gradients and state, and its activations
until its backward. So the peaks of the forward, the backward and the optimizer's step are straight lines over the
number of blocks. Two depths give the lines.

Of one rank of ``strategy="fsdp2"``, weights, gradients and state are computed and activations simulated.
"""

import copy
from dataclasses import replace
from itertools import groupby
from typing import Any, Final, NamedTuple, final

from torch import nn

from lightning_lowprec import names
from lightning_lowprec.conversion.name_suffixes import MASTERS, split
from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.tools.fits.memory_meter import Peaks
from lightning_lowprec.tools.fits.simulated_step import OPTIMIZER, Setting, simulate
from lightning_lowprec.tools.planning.costs import footprints, per_rank
from lightning_lowprec.tools.planning.inputs import Inputs

DEPTHS: Final = (3, 4)  # numbers of blocks that are simulated


class Run(NamedTuple):
    """Equal blocks in a row: positions ``start`` to ``start + length - 1`` of the list at ``fqn``."""

    fqn: str
    start: int
    length: int


def longest_run(model: nn.Module) -> Run | None:
    """Return the equal blocks with the most parameters, or None if no list has more of them than are simulated."""
    runs: dict[Run, int] = {}
    for fqn, stack in model.named_modules():
        start = 0
        for _, same in groupby(stack if isinstance(stack, nn.ModuleList | nn.Sequential) else (), key=_shape):
            blocks = list(same)
            if len(blocks) > max(DEPTHS):
                runs[Run(fqn, start, len(blocks))] = sum(p.numel() for block in blocks for p in block.parameters())
            start += len(blocks)
    return max(runs, key=lambda run: runs[run], default=None)


def _shape(block: nn.Module) -> Any:
    children = tuple((fqn, type(module)) for fqn, module in block.named_modules())
    return children, tuple((fqn, p.shape, p.dtype, p.requires_grad) for fqn, p in block.named_parameters())


@final
class Simulator:
    """Simulate settings of one model, on the meta device, which stays as it is; every setting once."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.inputs = inputs
        self.run = longest_run(model)
        self._model = model
        self._simulated: dict[str, Peaks] = {}

    def peaks(self, setting: Setting) -> Peaks:
        """Return the peak of every stretch of a step: bytes by category."""
        key = repr(setting)
        if key not in self._simulated:
            self._simulated[key] = self._simulate(setting) if setting.devices == 1 else self._of_one_rank(setting)
        return self._simulated[key]

    def _simulate(self, setting: Setting) -> Peaks:
        if self.run is None:
            return simulate(self._model, self.inputs, setting)
        few, more = (simulate(_cut(self._model, self.run, depth), self.inputs, setting) for depth in DEPTHS)
        times = (self.run.length - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
        return {
            stretch: {name: round(size + times * (more[stretch][name] - size)) for name, size in peak.items()}
            for stretch, peak in few.items()
        }

    def _of_one_rank(self, setting: Setting) -> Peaks:
        """The shards stand under ``state``; gathered weights, and gradients on their way, under ``temporaries``."""
        precision, plan = setting.precision, make_plan(self._model)
        sizes = footprints(self._model, plan, precision)[-1:]
        ranks = per_rank(self._model, plan, sizes, shards=setting.devices)
        if not ranks:
            raise ValueError(f"`precision={precision!r}` does not run under strategy='fsdp2'.")
        peaks: Peaks = {}
        for stretch, on_one in self.peaks(replace(setting, devices=1, precision=_without_casts(precision))).items():
            own = on_one["temporaries"]
            peaks[stretch] = dict.fromkeys(on_one, 0)
            peaks[stretch]["state"] = round(ranks[0].state)
            peaks[stretch]["activations"] = on_one["activations"]
            peaks[stretch]["temporaries"] = own // setting.devices if stretch == OPTIMIZER else own + ranks[0].in_flight
        return peaks


def _cut(model: nn.Module, run: Run, depth: int) -> nn.Module:
    cut = slice(run.start + depth, run.start + run.length)
    stack: Any = model.get_submodule(run.fqn)
    left_out = {id(block): None for block in stack[cut]}
    copied = copy.deepcopy(model, left_out)  # blocks that are left out are not copied
    kept: Any = copied.get_submodule(run.fqn)
    del kept[cut]
    return copied


def _without_casts(precision: str) -> str:
    """Return the name whose weights have on one GPU the dtype in which FSDP2 gathers them: no casts are kept."""
    if precision in ("32-true", "bf16-true"):
        return precision
    stem, suffix = split(precision)
    row = names.TABLE.get(precision)
    if row is None or row.backend is None:
        return "bf16-sr"
    return f"{stem if suffix in MASTERS else precision}-sr"
