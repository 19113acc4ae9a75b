"""Give layers that lose too much in FP8 back to bf16 during a run.

The decision is a function of the readings of a monitor, which are the same on all ranks. What was decided is state of
the monitor: a run that is resumed goes on with the same layers demoted. Nothing is promoted back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

from lightning_lowprec.callbacks.readings import Reading, by_layer
from lightning_lowprec.checks import Count
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.options import shows

if TYPE_CHECKING:
    from torch import nn

_HIGH: Final = "bf16"


@final
@shows()
@dataclass(frozen=True, kw_only=True)
class Demotion:
    """The limits beyond which a layer is better kept in high precision.

    Args:
        underflow: a reading is bad if a larger share of the values of one tensor becomes 0.
        output_db: a reading is bad if the signal to noise of the output is smaller, dB.
        patience: a layer with so many bad readings in a row goes to bf16.
    """

    underflow: float = 0.3
    output_db: float = 20.0
    patience: Count = 3

    def reason(self, layer: Sequence[Reading]) -> str | None:
        """Return why one reading of a layer (of up to three tensors) is beyond a limit, or None."""
        for reading in layer:
            if math.isnan(reading.amax):
                return f"{reading.tensor} is not finite"
            if reading.underflow is not None and reading.underflow > self.underflow:
                return f"{reading.underflow:.0%} of {reading.tensor} become 0"
        output_db = layer[0].output_db if layer else None
        return None if output_db is None or output_db >= self.output_db else f"output has {output_db:.1f} dB"


@final
@dataclass
class Demoter:
    """Counts bad readings, and demotes."""

    limits: Demotion
    bad: dict[str, int] = field(default_factory=dict)
    """By fqn: bad readings in a row."""
    demoted: dict[str, str] = field(default_factory=dict)
    """By fqn: the recipe that the layer has got."""

    def see(self, model: nn.Module, readings: Sequence[Reading]) -> None:
        """Demote the layers whose patience is at an end."""
        from lightning_utilities.core.rank_zero import rank_zero_warn

        layers = _layers(model)
        patience = self.limits.patience
        for fqn, layer in layers.items():
            backend = backends.owner(layer)
            if backend is not None and backend.reconfigure is None:
                raise ValueError(
                    f"`demote=` is not possible with {backend.title}, whose layers ({fqn!r}) cannot change their"
                    " precision during a run. Leave it out, or use FP8TorchAO or FP8TE."
                )
        for fqn, of_layer in by_layer(readings).items():
            reason = self.limits.reason(of_layer)
            self.bad[fqn] = 0 if reason is None else (self.bad.get(fqn, 0) + 1) % patience
            if reason is None or self.bad[fqn] or fqn in self.demoted:
                continue
            backends.reconfigure(layers[fqn], _HIGH)
            self.demoted[fqn] = _HIGH
            rank_zero_warn(
                f"NumericsMonitor: {fqn!r} runs in {_HIGH} from here on: {patience} readings in a row were bad, at step"
                f" {of_layer[0].step} because {reason}."
            )

    def restore(self, model: nn.Module) -> None:
        """Demote the layers that an earlier part of the run has demoted."""
        layers = _layers(model)
        for fqn, recipe in self.demoted.items():
            if fqn in layers and backends.owner(layers[fqn]) is not None:
                backends.reconfigure(layers[fqn], recipe)

    def report(self) -> str | None:
        """Return what was demoted, and how the next run begins so; None: nothing."""
        keep = f"The next run begins so with `keep={list(self.demoted)!r}`."
        return f"NumericsMonitor: {len(self.demoted)} layers were demoted. {keep}" if self.demoted else None

    def state_dict(self) -> dict[str, Any]:
        """Return what was counted and decided."""
        return {"bad": dict(self.bad), "demoted": dict(self.demoted)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was counted and decided; :meth:`restore` gives it to a model."""
        self.bad, self.demoted = dict(state["bad"]), dict(state["demoted"])


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    from lightning_lowprec.callbacks.sampling import named_layers  # the limits alone need no torch

    return dict(named_layers(model))
