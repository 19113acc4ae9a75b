"""The peak of one rank of ``strategy="fsdp2"``: state and gathered weights by arithmetic, activations by simulation."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_lowprec import names
from lightning_lowprec.conversion.name_suffixes import MASTERS, split
from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.tools.planning.costs import COMPARED, footprints
from lightning_lowprec.tools.planning.extrapolation import Simulator
from lightning_lowprec.tools.planning.memory_meter import ACTIVATIONS, STATE, TEMPORARIES, Peaks
from lightning_lowprec.tools.planning.memory_step import OPTIMIZER, SET_UP, Setting
from lightning_lowprec.tools.planning.per_rank import per_rank


def sharded_peaks(model: nn.Module, simulator: Simulator, setting: Setting, devices: int) -> Peaks:
    """Return the peak of every stretch of a step of one rank, in bytes by category.

    The shards' weights, gradients and optimizer state stand under ``state``, gathered weights and gradients on their
    way, an upper bound, under ``temporaries``.

    Args:
        model: the whole model.
        simulator: simulates the model on one GPU.
        setting: how the model trains, with the batch of one rank.
        devices: ranks, one copy of the model.

    Raises:
        ValueError: the precision does not run under FSDP2, or the model does not divide into so many shards.
    """
    precision = setting.precision
    row = names.TABLE.get(precision)
    converts = row is not None and row.plugin.backend is not None
    plan = make_plan(model)
    sizes = footprints(model, plan, precision, fp8_all_gather=bool(row and converts and row.gathers_fp8))
    if not converts:
        sizes = sizes[:-1]
    layout = precision if converts or precision in COMPARED else "bf16-mixed"
    found = [rank for rank in per_rank(model, plan, sizes, shards=devices) if rank.precision == layout]
    if not found:
        raise ValueError(f"`precision={precision!r}` does not run under strategy='fsdp2'.")
    rank = found[-1]
    on_one = simulator.peaks(replace(setting, precision=_of_gathered(precision, converts=converts)))
    return {
        stretch: {
            **dict.fromkeys(peak, 0),
            STATE: round(rank.state),
            ACTIVATIONS: peak[ACTIVATIONS],
            TEMPORARIES: peak[TEMPORARIES] // devices if stretch == OPTIMIZER else peak[TEMPORARIES] + rank.in_flight,
        }
        for stretch, peak in on_one.items()
        if stretch != SET_UP  # shards are set up from the meta device
    }


def _of_gathered(precision: str, *, converts: bool) -> str:
    """Return the name whose weights have on one GPU the dtype in which FSDP2 gathers them: no casts are kept."""
    if precision in ("32-true", "bf16-true"):
        return precision
    stem, suffix = split(precision)
    if not converts:
        return "bf16-sr"
    return f"{stem if suffix in MASTERS else precision}-sr"
