"""The table of a comparison for a terminal, and its report in Markdown beside the picture of the losses."""

from __future__ import annotations

import json

from lightning_lowprec.tools.compare.pictures import loss_picture
from lightning_lowprec.tools.compare.result import Comparison, PrecisionResult, Verdict
from lightning_lowprec.tools.table import format_table

STEP_TIME = (
    "Step time: the median wall time of a training batch, from its start until its loss is read: forward, backward and"
    " optimizer step, without loading the data. The first few batches are left out."
)


def write_report(comparison: Comparison) -> None:
    """Write ``report.md`` and ``loss.png`` into the folder of the spec."""
    (comparison.spec.out / "loss.png").write_bytes(loss_picture(comparison))
    comparison.report.write_text(markdown(comparison), encoding="utf-8")


def text(comparison: Comparison) -> str:
    """Return the table for a terminal, with the remarks below."""
    return "\n".join([*_table(comparison, markdown=False), *remarks(comparison)])


def markdown(comparison: Comparison) -> str:
    """Return the report."""
    spec = comparison.spec
    memory = next((result.memory_kind for result in comparison.results if result.memory_kind), "not measured")
    parts = [
        f"# {spec.model} under {len(spec.precisions)} precisions",
        _verdict(comparison),
        "\n".join(_table(comparison, markdown=True)),
        *(f"> {remark}" for remark in remarks(comparison)),
        "![training loss, validation metric, and its distance from the baseline](loss.png)",
        f"{STEP_TIME} Peak memory: {memory}.",
    ]
    notes = [f"- {result.name}: {note}" for result in comparison.results for note in result.notes]
    if notes:
        parts += ["## Messages of the precisions", "\n".join(notes)]
    for result in comparison.results:
        if result.error:
            parts += [f"## {result.name} failed", _indented(result.error)]
    parts += [
        "## Environment",
        _environment(comparison),
        "## Settings",
        _indented(json.dumps(spec.as_dict(), indent=2)),
    ]
    return "\n\n".join(parts) + "\n"


def remarks(comparison: Comparison) -> list[str]:
    """Return sentences to read before the figures, the most important first."""
    on_cpu = [result.name for result in comparison.results if result.device_type == "cpu"]
    found = []
    if any("fp8" in name or "fp4" in name for name in on_cpu):
        found.append(
            "This ran on a CPU, where FP8 is emulated: the losses show what FP8's rounding does to this training, but"
            " the step times and the memory say nothing about a GPU."
        )
    elif on_cpu:
        found.append("This ran on a CPU: the step times and the memory say nothing about a GPU.")
    if len(comparison.results) == 1:
        found.append("Only one precision was asked for, so nothing was compared.")
    return found


def _table(comparison: Comparison, *, markdown: bool) -> list[str]:
    header = ("precision", comparison.spec.val_metric, "gap", "train loss", "step time", "peak memory", "verdict")
    rows = [_cells(*pair) for pair in zip(comparison.results, comparison.verdicts, strict=True)]
    return format_table([header, *rows], right=range(1, 6), markdown=markdown)


def _cells(result: PrecisionResult, verdict: Verdict) -> tuple[str, ...]:
    return (
        result.name,
        _number(result.final_val, ".4f"),
        _number(verdict.gap, "+.2%"),
        _number(result.final_train, ".4f"),
        _number(result.step_time, ".1f", 1e3, " ms"),
        _number(result.peak_memory, ".0f", 2**-20, " MiB"),
        verdict.text,
    )


def _number(value: float | None, form: str, scale: float = 1.0, unit: str = "") -> str:
    return "-" if value is None else f"{value * scale:{form}}{unit}"


def _verdict(comparison: Comparison) -> str:
    spec = comparison.spec
    rule = f"the final {spec.val_metric} within {100 * spec.max_loss_gap:g}% of {spec.baseline}'s"
    if comparison.ok:
        return f"Every precision trained and ended with {rule}."
    failed = [r.name for r, v in zip(comparison.results, comparison.verdicts, strict=True) if not v.ok]
    return f"**Not every precision ended with {rule}: {', '.join(failed)}.**"


def _environment(comparison: Comparison) -> str:
    ran = next((result for result in comparison.results if result.device), None)
    facts = {"device": ran.device, "CPU threads": str(ran.threads), **ran.versions} if ran else {}
    facts |= {name: str(getattr(comparison.spec, name)) for name in ("seed", "max_steps", "data")}
    return "\n".join(format_table([("", ""), *facts.items()], markdown=True))


def _indented(block: str) -> str:
    """Return a block of code in Markdown."""
    return "\n".join(f"    {line}" for line in block.splitlines())
