"""Warn when a program writes to frozen half-precision weights, such as a teacher that a module averages by hand.

    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(0.999).add_(s, alpha=0.001)      # in bf16, 0.999 * t rounds back to t

A weight that no optimizer holds has no master. So such changes are lost, and nothing else would say so. Before the
optimizer steps 1, 2, 4, 8 and so on, the versions, places and some values of these weights are compared. A write
through ``.data`` in place leaves version and place alone: it is noticed when it has changed one of these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, final

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_lowprec.masters.weights import is_marked
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.parameters import parameters_of
from lightning_lowprec.private.torch import local_tensor, version_of

SAMPLES: Final = 64  # values of each weight that are compared


class _Weight(NamedTuple):
    identity: int  # torch cannot swap a tensor that has a weak reference
    version: int
    place: int
    values: Tensor


def _as_it_is(parameter: Tensor) -> _Weight:
    local = local_tensor(parameter).detach()
    stride = max(1, local.numel() // SAMPLES)
    values = local.view(-1)[::stride][:SAMPLES].clone() if local.is_contiguous() else local.new_empty(0)
    return _Weight(id(parameter), version_of(parameter), local.data_ptr(), values.view(torch.int16))


def _written(before: Mapping[str, _Weight], now: Mapping[str, _Weight]) -> list[str]:
    """Return the weights that differ; a device is waited for once."""
    both = {
        fqn: (before[fqn], new) for fqn, new in now.items() if fqn in before and before[fqn].identity == new.identity
    }
    moved = [fqn for fqn, (old, new) in both.items() if old[:3] != new[:3]]
    if moved or not both:
        return moved
    differ = [(old.values != new.values).any() for old, new in both.values()]
    flags = torch.stack([flag.to(differ[0].device) for flag in differ]).tolist()
    return [fqn for fqn, flag in zip(both, flags, strict=True) if flag]


@final
class FrozenWrites:
    """The frozen half-precision weights of one plugin's modules, as they were at the last look."""

    def __init__(self) -> None:
        self._steps = 0
        self._weights: dict[str, _Weight] | None = {}

    def is_due(self) -> bool:
        """Count a step; return whether to look before it."""
        self._steps += 1
        return self._steps & (self._steps - 1) == 0

    def watch(self, plugin: Any) -> None:
        """Warn once, before a step of a plugin with masters, if the program has written to frozen weights."""
        if self._weights is None or not self.is_due():
            return
        trained = {id(p) for o in (*plugin.optimizers, *plugin.after_fit.optimizers) for p in parameters_of(o)}
        parameters = {fqn: p for model in plugin.modules.prepared for fqn, p in model.named_parameters()}
        cast = {fqn: p for fqn, p in parameters.items() if p.dtype in HALF_DTYPES and is_marked(p) and not is_lazy(p)}
        frozen = {fqn: p for fqn, p in cast.items() if not p.requires_grad and id(p) not in trained}
        before, self._weights = self._weights, {fqn: _as_it_is(p) for fqn, p in frozen.items()}
        written = _written(before, self._weights)
        if not written:
            return
        self._weights = None
        dtype = str(plugin.autocast_dtype).removeprefix("torch.")
        more = f" and {len(written) - 1} more" if len(written) > 1 else ""
        names = list(dict.fromkeys(_shortest(fqn, parameters) for fqn in written))
        shown = f"[{', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''}]"
        rank_zero_warn(
            f"`precision={plugin.precision!r}`: the program writes to {written[0]!r}{more}, which no optimizer holds"
            f" and which became {dtype}: small changes are rounded away. Keep such weights float32 by"
            f" the option `keep_fp32={shown}` of {type(plugin).__name__}."
        )

    def __reduce__(self) -> tuple[type[FrozenWrites], tuple[()]]:
        return type(self), ()  # the weights stay in their process


def _shortest(fqn: str, parameters: Mapping[str, Tensor]) -> str:
    """Return the shortest beginning of ``fqn`` that no trainable parameter has."""
    parts = fqn.split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    trained = [f"{other}." for other, p in parameters.items() if p.requires_grad]
    return next((p for p in prefixes if not any(t.startswith(f"{p}.") for t in trained)), fqn)
