"""What a comparison found."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_lowprec.tools.compare.spec import CompareSpec

WARMUP_STEPS = 5
"""First steps that the median step time leaves out: they allocate, compile and fill caches."""


@dataclass(frozen=True, kw_only=True)
class PrecisionResult:
    """The raw figures of one training; as far as it got, if `error` says that it failed."""

    name: str
    """The precision."""
    train_losses: list[float] = field(default_factory=list)
    """One per training batch."""
    step_seconds: list[float] = field(default_factory=list)
    """Wall time from the start of a training batch to its loss being read back, optimizer step included."""
    val_steps: list[int] = field(default_factory=list)
    """Training batches before each validation."""
    val_losses: list[float] = field(default_factory=list)
    """The validation metric, one per validation."""
    peak_memory: int | None = None
    """Bytes; None if it could not be measured."""
    memory_kind: str = ""
    """What `peak_memory` is."""
    device: str = ""
    """The device in words."""
    device_type: str = ""
    """`cpu`, `cuda`, ..."""
    threads: int = 0
    """CPU threads that torch used."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of Python and of the packages that matter."""
    notes: list[str] = field(default_factory=list)
    """What the precision said about itself, e.g. how many layers it converted."""
    error: str | None = None
    """Why it failed."""

    @property
    def final_val(self) -> float | None:
        """The validation metric after the last step."""
        return self.val_losses[-1] if self.val_losses and self.error is None else None

    @property
    def final_train(self) -> float | None:
        """The mean training loss of the last tenth of the steps."""
        tail = self.train_losses[-max(1, len(self.train_losses) // 10) :]
        return statistics.fmean(tail) if tail else None

    @property
    def step_time(self) -> float | None:
        """The median time of a step in seconds, warm-up left out."""
        warmup = min(WARMUP_STEPS, len(self.step_seconds) // 2)
        return statistics.median(self.step_seconds[warmup:]) if self.step_seconds else None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether one precision holds, and why."""

    ok: bool
    text: str
    gap: float | None = None
    """Relative difference from the baseline's final validation metric, with its sign."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All results of one comparison, in the order of `spec.precisions`."""

    spec: CompareSpec
    results: list[PrecisionResult]

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.spec.out / "report.html"

    @property
    def verdicts(self) -> list[Verdict]:
        """One per result."""
        return [judge(result, self.results[0], self.spec.max_loss_gap) for result in self.results]

    @property
    def ok(self) -> bool:
        """Whether every precision trained, stayed finite and ended near the baseline."""
        return all(verdict.ok for verdict in self.verdicts)

    def as_dict(self) -> dict[str, Any]:
        """Every raw figure as strict JSON; a value that is not finite becomes null."""
        rows = [
            asdict(result) | asdict(verdict) | {"final_val": result.final_val, "step_time": result.step_time}
            for result, verdict in zip(self.results, self.verdicts, strict=True)
        ]
        plain: dict[str, Any] = _finite({"ok": self.ok, "spec": self.spec.as_dict(), "results": rows})
        return plain

    def write_json(self, path: Path) -> None:
        """Write `as_dict`."""
        path.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def judge(result: PrecisionResult, baseline: PrecisionResult, max_loss_gap: float) -> Verdict:
    """A precision holds if it trained and its final metric is finite and within `max_loss_gap` of the baseline's."""
    if result.error is not None:
        return Verdict(ok=False, text="failed: " + result.error.strip().rpartition("\n")[2])
    value, reference = result.final_val, baseline.final_val
    if value is None or not math.isfinite(value):
        return Verdict(ok=False, text=f"final validation metric is {value}")
    if result is baseline:
        return Verdict(ok=True, text="baseline", gap=0.0)
    if reference is None or not math.isfinite(reference):
        return Verdict(ok=False, text=f"not judged: the baseline {baseline.name} has no finite result")
    gap = _relative(value, reference)
    if abs(gap) <= max_loss_gap:
        return Verdict(ok=True, text=f"within {100 * max_loss_gap:g}%", gap=gap)
    return Verdict(ok=False, text=f"off by more than {100 * max_loss_gap:g}%", gap=gap)


def _relative(value: float, reference: float) -> float:
    if value == reference:
        return 0.0
    return (value - reference) / abs(reference) if reference else math.copysign(math.inf, value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
