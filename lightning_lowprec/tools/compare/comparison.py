"""All runs of one comparison, and the verdict on each precision."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lightning_lowprec.tools.compare.paired import Cost, judge_seeds
from lightning_lowprec.tools.compare.result import PrecisionResult, Verdict, judge
from lightning_lowprec.tools.compare.spec import CompareSpec
from lightning_lowprec.tools.strict_json import finite


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All results of one comparison, in the order of ``spec.runs``."""

    spec: CompareSpec
    results: list[PrecisionResult]

    @cached_property
    def runs(self) -> dict[str, list[PrecisionResult]]:
        """For each precision, its runs in the order of the seeds."""
        return {name: [run for run in self.results if run.name == name] for name in self.spec.precisions}

    @property
    def verdicts(self) -> list[Verdict]:
        """One verdict per precision."""
        return [verdict for verdict, _ in self._judged]

    @property
    def costs(self) -> dict[str, Cost]:
        """For each precision that was judged over several seeds, but the baseline: its cost."""
        judged = zip(self.spec.precisions, self._judged, strict=True)
        return {name: cost for name, (_, cost) in judged if cost is not None}

    @cached_property
    def _judged(self) -> list[tuple[Verdict, Cost | None]]:
        bound = self.spec.max_loss_gap
        if self.spec.seeds == 1:
            return [(judge(result, self.results[0], bound), None) for result in self.results]
        baseline = self.runs[self.spec.baseline]
        return [judge_seeds(runs, baseline, bound) for runs in self.runs.values()]

    @property
    def ok(self) -> bool:
        """Whether every precision trained, stayed finite and ended near the baseline."""
        return all(verdict.ok for verdict in self.verdicts)

    def to_json(self) -> str:
        """Return every raw figure as strict JSON; a value that is not finite becomes null."""
        figures: dict[str, Any] = {"ok": self.ok, "spec": asdict(self.spec)}
        if self.spec.seeds == 1:
            verdicts = [asdict(verdict) for verdict in self.verdicts]
        else:
            verdicts = [{}] * len(self.results)
            figures["precisions"] = [
                {"name": name, **asdict(verdict), "cost": None if cost is None else asdict(cost)}
                for name, (verdict, cost) in zip(self.spec.precisions, self._judged, strict=True)
            ]
        figures["results"] = [
            asdict(result) | verdict | {"final_val": result.final_val, "step_time": result.step_time}
            for result, verdict in zip(self.results, verdicts, strict=True)
        ]
        return json.dumps(finite(figures), indent=1, allow_nan=False, default=str) + "\n"
