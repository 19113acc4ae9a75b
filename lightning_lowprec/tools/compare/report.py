"""The table of a comparison for a terminal, and its report in Markdown beside the picture of the losses."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict

from lightning_lowprec.tools.compare import over_seeds
from lightning_lowprec.tools.compare.comparison import Comparison
from lightning_lowprec.tools.compare.pictures import draw_losses
from lightning_lowprec.tools.doctor import versions
from lightning_lowprec.tools.table import format_table

REPORT = "report.md"
"""The name of the report in its folder."""
HOW_MEASURED = (
    "Step time: the median wall time of a training batch, from its start until its loss is read: forward, backward and"
    " optimizer step, without loading the data. The first few batches are left out. Peak memory: the most bytes that"
    " torch allocated on the GPU; not measured on a CPU."
)


def write_report(comparison: Comparison) -> None:
    """Write ``results.json``, ``loss.png`` and ``report.md`` into the folder of the spec."""
    out = comparison.spec.out
    (out / "results.json").write_text(comparison.to_json(), encoding="utf-8")
    draw_losses(comparison, out / "loss.png")
    (out / REPORT).write_text(markdown(comparison), encoding="utf-8")


def text(comparison: Comparison) -> str:
    """Return the table for a terminal, with the remarks below."""
    return "\n".join([*_table(comparison, markdown=False), *remarks(comparison)])


def markdown(comparison: Comparison) -> str:
    """Return the report."""
    spec, results = comparison.spec, comparison.results
    device = next((result.device for result in results if result.device), "no training started")
    environment = {"device": device, "python": platform.python_version(), **versions()}
    parts = [
        f"# {spec.model} under {len(spec.precisions)} precisions",
        verdict(comparison) if comparison.ok else f"**{verdict(comparison)}**",
        "\n".join(_table(comparison, markdown=True)),
        *(f"> {remark}" for remark in remarks(comparison)),
        "![training loss, validation metric, and its distance from the baseline](loss.png)",
        HOW_MEASURED,
    ]
    if spec.seeds > 1:
        final = "\n".join(over_seeds.table_of_seeds(comparison))
        parts += [over_seeds.HOW_COMPARED, f"## Final {spec.val_metric} of each seed", final]
    notes = list(dict.fromkeys(f"- {result.name}: {note}" for result in results for note in result.notes))
    if notes:
        parts += ["## Messages of the precisions", "\n".join(notes)]
    for result in results:
        if result.error:
            seed = f" with seed {result.seed}" if spec.seeds > 1 else ""
            parts += [f"## {result.name} failed{seed}", _code(result.error)]
    parts += [
        "## Environment",
        "\n".join(f"- {name}: {value or 'not installed'}" for name, value in environment.items()),
        "## Settings",
        _code(json.dumps(asdict(spec), indent=2, default=str)),
    ]
    return "\n\n".join(parts) + "\n"


def remarks(comparison: Comparison) -> list[str]:
    """Return sentences to read before the figures, the most important first."""
    spec = comparison.spec
    on_cpu = [result.name for result in comparison.results if result.on_cpu]
    found = over_seeds.sentences(comparison)
    if spec.monitor:
        folders = ", ".join(str(spec.readings(name, seed)) for seed, name in spec.runs if name in spec.monitored)
        found.append(f"`lowprec monitor FOLDER` draws what FP8 took from every layer; the folders: {folders}.")
    if spec.schedule is not None:
        others = ", ".join(name for name in spec.precisions if name not in spec.scheduled)
        found.append(f"The schedule was followed by {', '.join(spec.scheduled)}; without it: {others or 'none'}.")
    if any("fp8" in name or "fp4" in name for name in on_cpu):
        found.append(
            "This ran on a CPU, where FP8 is emulated: the losses show what FP8's rounding does to this training, but"
            " the step times say nothing about a GPU."
        )
    elif on_cpu:
        found.append("This ran on a CPU: the step times say nothing about a GPU.")
    if len(spec.precisions) == 1:
        found.append("Only one precision was asked for, so nothing was compared.")
    return found


def _table(comparison: Comparison, *, markdown: bool) -> list[str]:
    cells, right = rows(comparison)
    return format_table(cells, right=right, markdown=markdown)


def rows(comparison: Comparison) -> tuple[list[tuple[str, ...]], range]:
    """Return the cells of the table, header first, and the columns that are aligned to the right."""
    if comparison.spec.seeds > 1:
        return over_seeds.rows(comparison), range(1, 7)
    header = ("precision", comparison.spec.val_metric, "gap", "train loss", "step time", "peak memory", "verdict")
    cells: list[tuple[str, ...]] = [header]
    for result, judged in zip(comparison.results, comparison.verdicts, strict=True):
        cells.append(
            (
                result.name,
                _number(result.final_val, ".4f"),
                _number(judged.gap, "+.2%"),
                _number(result.final_train, ".4f"),
                _number(result.step_time, ".1f", 1e3, " ms"),
                _number(result.peak_memory, ".0f", 2**-20, " MiB"),
                judged.text,
            )
        )
    return cells, range(1, 6)


def _number(value: float | None, form: str, scale: float = 1.0, unit: str = "") -> str:
    return "-" if value is None else f"{value * scale:{form}}{unit}"


def verdict(comparison: Comparison) -> str:
    """Return one sentence: whether every precision ended near the baseline, and which did not."""
    spec = comparison.spec
    rule = f"the final {spec.val_metric} within {100 * spec.max_loss_gap:g}% of {spec.baseline}'s"
    if spec.seeds > 1:
        rule += f" (the whole 95 % confidence interval over {spec.seeds} seeds)"
    if comparison.ok:
        return f"Every precision trained and ended with {rule}."
    failed = [name for name, v in zip(spec.precisions, comparison.verdicts, strict=True) if not v.ok]
    return f"Not every precision ended with {rule}: {', '.join(failed)}."


def _code(block: str) -> str:
    """Return a block of code in Markdown."""
    return "\n".join(f"    {line}" for line in block.splitlines())
