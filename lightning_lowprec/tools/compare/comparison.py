"""All runs of one comparison: figures, verdicts, table, report in Markdown, and the picture.

A precision is judged beside the baseline: by one run, or over several seeds. Over several seeds each run has a partner,
the baseline's run with the same seed: the differences within the pairs are smaller than those between seeds, and an
interval over the pairs (Student's t) tells smaller differences apart. matplotlib draws without a display and without
global state.
"""

import json
import math
import platform
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from textwrap import indent
from typing import TYPE_CHECKING, Any

from lightning_lowprec.messages import in_units
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.doctor import versions
from lightning_lowprec.tools.options import CompareSpec
from lightning_lowprec.tools.output import dumps, format_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARMUP_STEPS = 5
"""First steps that the median step time leaves out: they allocate, compile and fill caches."""
CONFIDENCE = 0.95
"""The share of experiments whose interval holds the true mean, if the differences are normal and independent."""
_STEPS = 2**60  # in the interval from 0 to pi / 2: the width of one is below that of a float64
REPORT = "report.md"
HOW_MEASURED = (
    "Step time: the median wall time of a training batch, from its start until its loss is read: forward, backward and"
    " optimizer step, without loading the data. The first few batches are left out. Peak memory: the most bytes that"
    " torch allocated on the GPU; not measured on a CPU."
)
HOW_COMPARED = (
    "Each run is compared with the baseline's run of the same seed, which begins with the same weights and reads the"
    " same batches. The gap is the mean of these relative differences. ± after a gap is the 95 % confidence interval of"
    " the mean (Student's t); ± after a loss is the standard deviation over the seeds. A precision passes if the whole"
    " interval of its gap is within the bound."
)
COLOURS = ("#3b3b3b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Grey for the baseline, then the colours of Okabe and Ito, which most colour-blind people can tell apart."""
SMOOTHING_SHARE = 20
"""The smoothed training loss is an average over a twentieth of the steps."""
_PICTURE = "training loss, validation metric, and its distance from the baseline"


@dataclass(kw_only=True)
class PrecisionResult:
    """The raw figures of one training, up to the failure if ``error`` is set."""

    name: str
    seed: int = 0
    train_losses: list[float] = field(default_factory=list)
    """One per training batch."""
    step_seconds: list[float] = field(default_factory=list)
    """Wall time of each training batch from its start until its loss is read, optimizer step included."""
    val_steps: list[int] = field(default_factory=list)
    """Training batches before each validation."""
    val_losses: list[float] = field(default_factory=list)
    peak_memory: int | None = None
    """Most bytes that torch allocated on the GPU; None on a CPU."""
    device: str = ""
    on_cpu: bool = False
    notes: list[str] = field(default_factory=list)
    """Messages that the precision logged, e.g. how many layers it converted."""
    error: str | None = None

    def add(self, message: Mapping[str, Any]) -> None:
        """Add the figures of one message of the training."""
        if "loss" in message:
            self.train_losses.append(message["loss"])
            self.step_seconds.append(message["seconds"])
        elif "val" in message:
            self.val_steps.append(len(self.train_losses))
            self.val_losses.append(message["val"])
        else:
            vars(self).update(message)

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
        """The median time of a step in seconds, without the warm-up."""
        warmup = min(WARMUP_STEPS, len(self.step_seconds) // 2)
        return statistics.median(self.step_seconds[warmup:]) if self.step_seconds else None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one precision; ``gap`` is the relative difference of its final metric from the baseline's."""

    ok: bool
    text: str
    gap: float | None = None
    cost: "Cost | None" = None
    """Over several seeds, unless a run failed, and not of the baseline."""


def judge(result: PrecisionResult, baseline: PrecisionResult, max_loss_gap: float) -> Verdict:
    """Judge a precision: it must train, and end with a finite metric within ``max_loss_gap`` of the baseline's."""
    if result.error is not None:
        return Verdict(ok=False, text="failed: " + result.error.strip().rpartition("\n")[2])
    value, reference = result.final_val, baseline.final_val
    if value is None:
        return Verdict(ok=False, text="no validation ran: expected training batches, validation_step, val_dataloader")
    if not math.isfinite(value):
        return Verdict(ok=False, text=f"final validation metric is {value}")
    if result is baseline:
        return Verdict(ok=True, text="baseline", gap=0.0)
    if reference is None or not math.isfinite(reference):
        return Verdict(ok=False, text=f"not judged: the baseline {baseline.name} has no finite result")
    gap = relative_gap(value, reference)
    if abs(gap) <= max_loss_gap:
        return Verdict(ok=True, text=f"within {100 * max_loss_gap:g}%", gap=gap)
    return Verdict(ok=False, text=f"off by more than {100 * max_loss_gap:g}%", gap=gap)


def relative_gap(value: float, reference: float) -> float:
    """Return the relative difference from ``reference``; a reference of 0 must be met almost exactly."""
    return (value - reference) / (abs(reference) or 1e-12)


# ---- over several seeds


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one precision against the baseline, over seeds."""

    gaps: list[float]
    """For each seed, the relative difference of the final metric from the baseline's."""
    gap: "Interval"


def judge_seeds(runs: Sequence[PrecisionResult], baseline: Sequence[PrecisionResult], max_loss_gap: float) -> Verdict:
    """Judge a precision over seeds: its whole interval must be within ``max_loss_gap``."""
    gaps = []
    for run, partner in zip(runs, baseline, strict=True):
        verdict = judge(run, partner, max_loss_gap)
        if verdict.gap is None:
            return Verdict(ok=False, text=f"seed {run.seed}: {verdict.text}")
        gaps.append(verdict.gap)
    if len({partner.final_val for partner in baseline}) == 1:
        text = "not judged: the baseline ends alike with every seed, so neither weights nor batches depend on the seed"
        return Verdict(ok=False, text=text)
    if runs[0] is baseline[0]:
        return Verdict(ok=True, text="baseline", gap=0.0)
    cost = Cost(gaps=gaps, gap=Interval.of(gaps))
    ok = cost.gap.is_within(max_loss_gap)
    return Verdict(ok=ok, text=_words(cost, max_loss_gap), gap=cost.gap.mean, cost=cost)


def _words(cost: Cost, bound: float) -> str:
    gap = cost.gap
    if not any(cost.gaps):
        return "equal with every seed"
    if gap.holds_zero:
        spread = f"the spread between seeds (±{gap.half_width:.2%}) is larger than the difference ({gap.mean:+.2%})"
        more = "" if gap.is_within(bound) else f"; more seeds may tell whether it is within {100 * bound:g}%"
        return f"not told apart: {spread}{more}"
    if gap.is_within(bound):
        return f"within {100 * bound:g}%"
    return f"{'worse' if gap.mean > 0 else 'better'} by {gap.percent(sign=False)}"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The values between ``mean - half_width`` and ``mean + half_width``."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Interval":
        """Return the 95 % confidence interval of the mean of at least two independent differences."""
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        return cls(mean=statistics.fmean(differences), half_width=student_t(len(differences) - 1) * error)

    @property
    def holds_zero(self) -> bool:
        """Whether the differences may be 0 on average."""
        return abs(self.mean) <= self.half_width

    def is_within(self, bound: float) -> bool:
        """Return whether every value of the interval is between ``-bound`` and ``bound``."""
        return abs(self.mean) + self.half_width <= bound

    def percent(self, *, sign: bool = True) -> str:
        """Return the interval in percent: ``+0.20% ± 0.10%``; without ``sign`` the absolute mean."""
        mean = f"{self.mean:+.2%}" if sign else f"{abs(self.mean):.2%}"
        return f"{mean} ± {self.half_width:.2%}"


def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t with ``P(|T| <= t) = confidence`` for Student's T with ``degrees`` degrees of freedom."""
    step = math.pi / 2 / _STEPS
    count = bisect_left(range(_STEPS), confidence, key=lambda number: _probability(degrees, number * step))
    return math.sqrt(degrees) * math.tan(count * step)


def _probability(degrees: int, angle: float) -> float:
    """Return ``P(|T| <= sqrt(degrees) * tan(angle))``: Abramowitz and Stegun, 26.7.3 (odd) and 26.7.4 (even)."""
    sin, cos = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cos if odd else 1.0
    total = 0.0 if degrees == 1 else term
    for power in range(odd + 2, degrees - 1, 2):
        term *= cos * cos * (power - 1) / power
        total += term
    return 2 / math.pi * (angle + sin * total) if odd else sin * total


# ---- all results


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """All results of one comparison, in the order of ``spec.runs``."""

    spec: CompareSpec
    results: list[PrecisionResult]

    @cached_property
    def runs(self) -> dict[str, list[PrecisionResult]]:
        """For each precision, its runs in the order of the seeds."""
        return {name: [run for run in self.results if run.name == name] for name in self.spec.precisions}

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict on each precision."""
        bound = self.spec.max_loss_gap
        if self.spec.seeds == 1:
            return {result.name: judge(result, self.results[0], bound) for result in self.results}
        baseline = self.runs[self.spec.baseline]
        return {name: judge_seeds(runs, baseline, bound) for name, runs in self.runs.items()}

    @property
    def ok(self) -> bool:
        """Whether every precision trained, stayed finite and ended near the baseline."""
        return all(verdict.ok for verdict in self.verdicts.values())

    @property
    def sentence(self) -> str:
        """One sentence: whether every precision ended near the baseline, and which did not."""
        spec = self.spec
        rule = f"the final {spec.val_metric} within {100 * spec.max_loss_gap:g}% of {spec.baseline}'s"
        if spec.seeds > 1:
            rule += f" (the whole 95 % confidence interval over {spec.seeds} seeds)"
        if self.ok:
            return f"Every precision trained and ended with {rule}."
        baseline = self.verdicts[spec.baseline]
        if not baseline.ok:
            return f"Nothing was compared: {spec.baseline}, the baseline, has no result ({baseline.text})."
        failed = [name for name, verdict in self.verdicts.items() if not verdict.ok]
        return f"Not every precision ended with {rule}: {', '.join(failed)}."

    def to_json(self) -> str:
        """Return every raw figure as strict JSON; a value that is not finite becomes null."""
        figures: dict[str, object] = {"ok": self.ok, "spec": asdict(self.spec)}
        verdicts = {name: asdict(verdict) for name, verdict in self.verdicts.items()}
        of_runs: dict[str, dict[str, object]] = {}
        if self.spec.seeds > 1:
            figures["precisions"] = [{"name": name, **verdict} for name, verdict in verdicts.items()]
        else:
            of_runs = {name: {key: verdict[key] for key in ("ok", "text", "gap")} for name, verdict in verdicts.items()}
        figures["results"] = [
            asdict(run) | of_runs.get(run.name, {}) | {"final_val": run.final_val, "step_time": run.step_time}
            for run in self.results
        ]
        return dumps(figures) + "\n"

    def __repr__(self) -> str:
        cells, right = rows(self)
        return "\n".join([*format_table(cells, right=right), *remarks(self)])


def write_report(comparison: Comparison) -> None:
    """Write ``results.json``, ``loss.png`` and ``report.md`` into the folder of the spec."""
    out = comparison.spec.out
    (out / "results.json").write_text(comparison.to_json(), encoding="utf-8")
    picture(comparison.spec, comparison.runs).savefig(out / "loss.png", metadata={"Software": None})  # no version in it
    (out / REPORT).write_text(markdown(comparison), encoding="utf-8")


def markdown(comparison: Comparison) -> str:
    """Return the report."""
    spec, results = comparison.spec, comparison.results
    device = next((result.device for result in results if result.device), "no training started")
    environment = {"device": device, "python": platform.python_version(), **versions()}
    cells, right = rows(comparison)
    parts = [
        f"# {spec.model} under {len(spec.precisions)} precisions",
        comparison.sentence if comparison.ok else f"**{comparison.sentence}**",
        "\n".join(format_table(cells, right=right, markdown=True)),
        *(f"> {remark}" for remark in remarks(comparison)),
        f"![{_PICTURE}](loss.png)",
        HOW_MEASURED,
    ]
    if spec.seeds > 1:
        of_seeds = [("seed", *comparison.runs)]
        for runs in zip(*comparison.runs.values(), strict=True):
            of_seeds.append((str(runs[0].seed), *(_spread([run.final_val]) for run in runs)))
        table = format_table(of_seeds, right=range(1, len(of_seeds[0])), markdown=True)
        parts += [HOW_COMPARED, f"## Final {spec.val_metric} of each seed", "\n".join(table)]
    notes = list(dict.fromkeys(f"- {result.name}: {note}" for result in results for note in result.notes))
    if notes:
        parts += ["## Messages of the precisions", "\n".join(notes)]
    for result in results:
        if result.error:
            seed = f" with seed {result.seed}" if spec.seeds > 1 else ""
            parts += [f"## {result.name} failed{seed}", indent(result.error, "    ")]
    parts += [
        "## Environment",
        "\n".join(f"- {name}: {value or 'not installed'}" for name, value in environment.items()),
        "## Settings",
        indent(json.dumps(asdict(spec), indent=2, default=str), "    "),
    ]
    return "\n\n".join(parts) + "\n"


def remarks(comparison: Comparison) -> list[str]:
    """Return sentences to read before the figures, the most important first."""
    spec = comparison.spec
    on_cpu = [result.name for result in comparison.results if result.on_cpu]
    costs = {name: verdict.cost for name, verdict in comparison.verdicts.items()}
    sentences = [f"{name} {_cost(cost, spec.val_metric)}" for name, cost in costs.items() if cost is not None]
    rows = filter(None, map(TABLE.get, on_cpu))
    if any(row.formats is not None and row.formats.output.startswith("e") for row in rows):  # floats of 8 or 4 bits
        sentences.append(
            "This ran on a CPU, where FP8 is emulated: the losses show what FP8's rounding does to this training, but"
            " the step times say nothing about a GPU."
        )
    elif on_cpu:
        sentences.append("This ran on a CPU: the step times say nothing about a GPU.")
    if len(spec.precisions) == 1:
        sentences.append("Only one precision was asked for, so nothing was compared.")
    return sentences


def _cost(cost: Cost, metric: str) -> str:
    if not any(cost.gaps):
        return f"ends with the baseline's {metric} with every seed."
    if cost.gap.holds_zero:
        return f"cannot be told apart from the baseline: {cost.gap.percent()} of {metric}."
    return f"{'costs' if cost.gap.mean > 0 else 'saves'} {cost.gap.percent(sign=False)} of {metric}."


def rows(comparison: Comparison) -> tuple[list[tuple[str, ...]], range]:
    """Return the cells of the table, header first, and the columns that are aligned to the right."""
    header = ("precision", comparison.spec.val_metric, "gap", "train loss", "step time", "peak memory")
    cells: list[tuple[str, ...]] = [(*header, "verdict")]
    for name, runs in comparison.runs.items():
        verdict = comparison.verdicts[name]
        gap = "-" if verdict.gap is None else f"{verdict.gap:+.2%}"
        if comparison.spec.seeds > 1:
            gap = "-" if verdict.cost is None else verdict.cost.gap.percent()
        times = [run.step_time for run in runs if run.step_time is not None]
        memory = [run.peak_memory for run in runs if run.peak_memory is not None]
        time = f"{1e3 * statistics.median(times):.1f} ms" if times else "-"
        peak = in_units(max(memory)) if memory else "-"
        val, train = _spread([run.final_val for run in runs]), _spread([run.final_train for run in runs])
        cells.append((name, val, gap, train, time, peak, verdict.text))
    return cells, range(1, len(header))


def _spread(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    mean = f"{statistics.fmean(numbers):.4f}"
    return mean if len(numbers) == 1 else f"{mean} ± {statistics.stdev(numbers):.4f}"


# ---- the picture


def picture(spec: CompareSpec, runs: Mapping[str, Sequence[PrecisionResult]]) -> "Figure":
    """Return the training loss, the validation metric and its distance from the baseline, with a line for each seed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(15, 4.4), layout="constrained", dpi=100)
    train, val, gap = figure.subplots(1, 3)
    reach = max(len(run.train_losses) for of_name in runs.values() for run in of_name) // SMOOTHING_SHARE // 2
    allowed = 100 * spec.max_loss_gap
    gap.axhspan(-allowed, allowed, color="#009e73", alpha=0.10, linewidth=0)
    for i, of_name in enumerate(runs.values()):
        for run, partner in zip(of_name, runs[spec.baseline], strict=True):
            style = _style(i)
            trained = smooth(run.train_losses, reach)
            train.plot(range(1, len(trained) + 1), trained, label=run.name if run is of_name[0] else None, **style)
            style |= {"marker": "o", "markersize": 4}
            val.plot(run.val_steps, run.val_losses, **style)
            gaps = [100 * relative_gap(*pair) for pair in zip(run.val_losses, partner.val_losses, strict=False)]
            gap.plot(run.val_steps[: len(gaps)], gaps, **style)
    train.set(title=f"Training loss (mean of {2 * reach + 1} steps)", ylabel="loss")
    val.set(title="Validation, the same batches each time", ylabel=spec.val_metric)
    if spec.seeds > 1:
        figure.suptitle(f"A line for each of {spec.seeds} seeds")
    gap.set(title=f"Distance from {spec.baseline} (green: ±{allowed:g} %)", ylabel=f"{spec.val_metric}, %")
    for axes in (train, val, gap):
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(True, alpha=0.25)
    figure.legend(loc="outside lower center", ncols=min(len(runs), 6), frameon=False)
    return figure


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and up to ``reach`` values on both sides: no lag behind a falling loss."""
    around = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in around]


def _style(index: int) -> dict[str, Any]:
    """Return the style of a curve: the baseline is wide and below, so that equal curves stay visible."""
    colour = COLOURS[index % len(COLOURS)]
    if index == 0:
        return {"color": colour, "linewidth": 4.0, "alpha": 0.45}
    return {"color": colour, "linewidth": 1.6, "linestyle": ("-", "--", "-.", ":")[(index - 1) % 4]}
