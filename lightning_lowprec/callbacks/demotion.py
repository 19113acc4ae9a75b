"""Give layers that lose too much in FP8 another precision during a run: one scale -> a scale per row -> bf16.

The decision is a function of the readings of a monitor, which are the same on all ranks. What was decided is state of
the monitor: a run that is resumed goes on with the same layers demoted. Nothing is promoted back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_lowprec.callbacks.layers import named_layers
from lightning_lowprec.callbacks.readings import Reading, Thresholds, by_layer
from lightning_lowprec.checks import Count, check_types
from lightning_lowprec.conversion import backends

Rung = Literal["rowwise", "bf16"]
_HIGH = "bf16"


@final
@dataclass(frozen=True, kw_only=True)
class Demotion:
    """When a layer gets another precision, and which.

    Args:
        underflow: a reading is bad if a larger share of the values of one tensor becomes 0.
        output_db: a reading is bad if the signal to noise of the output is smaller, dB.
        patience: a layer with so many bad readings in a row is demoted by one rung.
        ladder: the recipes to go through. A layer that has scales per row already, or whose backend does not know the
            recipe, goes to the next rung. ``("bf16",)`` with ``base="fp16"``, which has no scales per row.
    """

    underflow: float = 0.3
    output_db: float = 20.0
    patience: int = 3
    ladder: tuple[Rung, ...] = ("rowwise", "bf16")

    def __post_init__(self) -> None:
        """Check every field."""
        numbers = {"underflow": self.underflow, "output_db": self.output_db, "patience": self.patience}
        check_types(numbers, {"underflow": float, "output_db": float, "patience": Count})
        object.__setattr__(self, "ladder", tuple(self.ladder))
        if self.ladder not in (("rowwise", _HIGH), (_HIGH,), ("rowwise",)):
            raise ValueError(f"`ladder={self.ladder!r}` is not valid; expected ('rowwise', 'bf16'), or a part of it.")


def check_can_change(model: nn.Module) -> None:
    """Raise ValueError if a backend of the model's layers cannot change their precision during a run."""
    for fqn, layer in named_layers(model):
        backend = backends.owner(layer)
        if backend is not None and backend.reconfigure is None:
            raise ValueError(
                f"`demote=` is not possible with {backend.title}, whose layers ({fqn!r}) cannot change their precision"
                " during a run. Leave it out, or use FP8TorchAO or FP8TE."
            )


@final
@dataclass
class Demoter:
    """Counts bad readings, and demotes."""

    rules: Demotion
    bad: dict[str, int] = field(default_factory=dict)
    """By fqn: bad readings in a row."""
    demoted: dict[str, str] = field(default_factory=dict)
    """By fqn: the recipe that the layer has got."""

    def see(self, model: nn.Module, readings: Sequence[Reading]) -> None:
        """Demote the layers whose patience is at an end.

        Raises:
            ValueError: the backend of a layer cannot change the precision of its layers.
        """
        check_can_change(model)
        limits = Thresholds(underflow=self.rules.underflow, output_db=self.rules.output_db)
        layers = dict(named_layers(model))
        for fqn, found in by_layer(readings).items():
            reason = limits.reason(found)
            self.bad[fqn] = 0 if reason is None else self.bad.get(fqn, 0) + 1
            if reason is None or self.bad[fqn] < self.rules.patience:
                continue
            self.bad[fqn] = 0
            rung = next(self._rungs(fqn, layers[fqn]), None)
            if rung is None:
                continue
            backends.reconfigure(layers[fqn], rung)
            self.demoted[fqn] = rung
            rank_zero_warn(
                f"NumericsMonitor: {fqn!r} runs in {rung} from here on: {self.rules.patience} readings in a row were"
                f" bad, at step {found[0].step} because {reason}."
            )

    def _rungs(self, fqn: str, layer: nn.Module) -> Iterator[str]:
        backend = backends.owner(layer)
        has_one_scale = getattr(layer, "wire_format", None) is not None
        for rung in self.rules.ladder:
            if rung == _HIGH:
                if self.demoted.get(fqn) != _HIGH:
                    yield rung
            elif has_one_scale and backend is not None and rung in backend.recipes:
                yield rung

    def restore(self, model: nn.Module) -> None:
        """Demote the layers that an earlier part of the run has demoted."""
        layers = dict(named_layers(model))
        for fqn, rung in self.demoted.items():
            if fqn in layers and backends.owner(layers[fqn]) is not None:
                backends.reconfigure(layers[fqn], rung)

    def report(self) -> str | None:
        """Return what was demoted, and how the next run begins so; None: nothing."""
        if not self.demoted:
            return None
        kept = [fqn for fqn, rung in self.demoted.items() if rung == _HIGH]
        rows = [fqn for fqn, rung in self.demoted.items() if rung != _HIGH]
        text = f"NumericsMonitor: {len(self.demoted)} layers were demoted."
        if kept and not rows:
            return f"{text} The next run begins so with `keep={kept!r}`."
        recipe = {**dict.fromkeys(kept, _HIGH), **dict.fromkeys(rows, "rowwise")}
        if self.bad.keys() - self.demoted.keys():
            recipe["*"] = "tensorwise"
        return f"{text} The next run begins so with `recipe={recipe!r}`."

    def state_dict(self) -> dict[str, Any]:
        """Return what was counted and decided."""
        return {"bad": dict(self.bad), "demoted": dict(self.demoted)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was counted and decided; :meth:`restore` gives it to a model."""
        self.bad, self.demoted = dict(state["bad"]), dict(state["demoted"])
