"""Warn when a program writes to frozen half-precision weights, such as a teacher that a module averages by hand.

    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(0.999).add_(s, alpha=0.001)      # in bf16, 0.999 * t rounds back to t

A weight that no optimizer holds has no master. So such changes are lost, and nothing else would say so. Before the
optimizer steps 1, 2, 4, 8 and so on, the versions, places and some values of these weights are compared. A write
through ``.data`` in place leaves version and place alone: it is noticed when it has changed one of these values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_lowprec.masters.weights import is_marked
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.private.torch import local_tensor, version_of
from lightning_lowprec.references import alive

SAMPLES: Final = 64
"""Values of each weight that are compared."""


@dataclass(frozen=True)
class _Weight:
    """One frozen weight, as it was at the last look."""

    identity: int  # torch cannot swap a tensor that has a weak reference
    version: int
    place: int
    values: Tensor

    @classmethod
    def of(cls, parameter: Tensor) -> _Weight:
        local = local_tensor(parameter).detach()
        stride = max(1, local.numel() // SAMPLES)
        values = local.view(-1)[::stride][:SAMPLES].clone() if local.is_contiguous() else local.new_empty(0)
        return cls(id(parameter), version_of(parameter), local.data_ptr(), values.view(torch.int16))


@final
class FrozenWrites:
    """The frozen half-precision weights of one plugin's modules."""

    def __init__(self) -> None:
        self._steps = 0
        self._weights: dict[str, _Weight] | None = {}

    def is_due(self) -> bool:
        """Count a step; return whether to look before it."""
        self._steps += 1
        return self._weights is not None and self._steps & (self._steps - 1) == 0

    def look(self, models: Iterable[torch.nn.Module], in_optimizers: set[int]) -> list[str]:
        """Return the fqns of frozen weights that were written since the last look; after such a find, look no more."""
        frozen = {
            fqn: p
            for model in models
            for fqn, p in model.named_parameters()
            if p.dtype in HALF_DTYPES
            and is_marked(p)
            and not is_lazy(p)
            and not p.requires_grad
            and id(p) not in in_optimizers
        }
        before, self._weights = self._weights or {}, {fqn: _Weight.of(p) for fqn, p in frozen.items()}
        present = {
            fqn: now for fqn, now in self._weights.items() if fqn in before and before[fqn].identity == now.identity
        }
        written = [fqn for fqn, now in present.items() if _moved(before[fqn], now)]
        if not written and present and not _equal([before[fqn] for fqn in present], list(present.values())):
            written = [fqn for fqn, now in present.items() if not torch.equal(before[fqn].values, now.values)]
        if written:
            self._weights = None
        return written

    def __getstate__(self) -> dict[str, object]:
        """Leave out the weights, which stay in their process."""
        return {"_steps": 0, "_weights": {}}


def _moved(before: _Weight, now: _Weight) -> bool:
    return (before.version, before.place) != (now.version, now.place)


def _equal(before: list[_Weight], now: list[_Weight]) -> bool:
    """Compare the values of all weights at once: one synchronization per device."""
    devices = {weight.values.device for weight in now}
    return all(
        torch.equal(*(torch.cat([w.values for w in weights if w.values.device == device]) for weights in (before, now)))
        for device in devices
    )


def watch(plugin: Any) -> None:
    """Warn once, before a step of a plugin with masters, if the program writes to frozen half-precision weights."""
    if not plugin.optimizers.frozen_writes.is_due():
        return
    models = plugin.modules.prepared
    optimizers = (*plugin.optimizers.known, *alive(plugin.after_fit.optimizers))
    written = plugin.optimizers.frozen_writes.look(models, {id(p) for o in optimizers for p in parameters_of(o)})
    if not written:
        return
    dtype = str(plugin.autocast_dtype).removeprefix("torch.")
    more = f" and {len(written) - 1} more" if len(written) > 1 else ""
    parameters = {fqn: p for model in models for fqn, p in model.named_parameters()}
    names = list(dict.fromkeys(_shortest(fqn, parameters) for fqn in written))
    shown = f"[{', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''}]"
    rank_zero_warn(
        f"`precision={plugin.precision!r}`: the program writes to {written[0]!r}{more}, which no optimizer holds and"
        f" which became {dtype}: small changes are rounded away. Keep such weights float32 by"
        f" the option `keep_fp32={shown}` of {type(plugin).__name__}."
    )


def _shortest(fqn: str, parameters: Mapping[str, Tensor]) -> str:
    """Return the shortest beginning of ``fqn`` that no trainable parameter has."""
    parts = fqn.split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    trained = [f"{other}." for other, p in parameters.items() if p.requires_grad]
    return next((p for p in prefixes if not any(t.startswith(f"{p}.") for t in trained)), fqn)
