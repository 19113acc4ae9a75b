"""Print what fits a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_lowprec.tools.planning.fits import MARGIN, MARGIN_SHARE, Report, Verdict, needed
from lightning_lowprec.tools.planning.memory_meter import CATEGORIES
from lightning_lowprec.tools.planning.memory_step import loaded_in_half
from lightning_lowprec.tools.table import format_table


def text(report: Report, origin: str, *, markdown: bool = False) -> str:
    """Return the report for a terminal, or in Markdown."""
    refused = [v for v in report.verdicts if v.refused is not None]
    lines = [*_heading(report, origin), "", *_table(_rows(report), markdown), "", _verdict(report)]
    if report.remedies:
        lines += ["", "What would need less, simulated (GB):", ""]
        lines += _table([["change", "precision", "peak", "fits"], *map(_remedy, report.remedies)], markdown)
    if refused:
        lines += ["", *(f"not simulated: {verdict.precision}: {verdict.refused}" for verdict in refused)]
    return "\n".join(lines)


def _heading(report: Report, origin: str) -> list[str]:
    setting = report.setting
    shape = f"batch {setting.batch} per GPU" + (f", {setting.sequence} tokens" if setting.sequence is not None else "")
    optimizer = f"AdamW ({'fused' if setting.fused else 'foreach, the default of torch'})"
    blocks = ", blocks computed again in the backward" if setting.checkpointing else ""
    ranks = f"; {report.devices} GPUs, strategy='fsdp2', figures of one" if report.devices > 1 else ""
    lines = [
        f"{origin}: {report.parameters / 1e9:.2f} B parameters; {shape}; {optimizer}{blocks}{ranks}.",
        "Simulated, not measured: two steps on tensors without values; peak as torch.cuda.max_memory_allocated().",
        f"Batch and loss: {report.inputs}.",
    ]
    halves = [verdict.precision for verdict in report.verdicts if loaded_in_half(verdict.precision)]
    if halves:
        lines.append(f"{', '.join(halves)}: the model is loaded in bf16, with `dtype=torch.bfloat16`.")
    if report.extrapolated is not None:
        lines.append(f"Figures are {report.extrapolated}.")
    if report.devices > 1:
        lines.append(
            "State per GPU and gathered weights are computed, activations simulated; gathered weights: at most."
        )
    return lines


def _rows(report: Report) -> list[list[str]]:
    rows = [["precision (GB)", *CATEGORIES, "peak", "in", "fits", "largest batch"]]
    for verdict in report.verdicts:
        if verdict.refused is None:
            parts = [_gb(verdict.peak[category]) for category in CATEGORIES]
            part = verdict.at.split()[0]
            rows.append(
                [verdict.precision, *parts, _gb(verdict.total), part, _word(verdict), str(verdict.largest_batch)]
            )
    return rows


def _verdict(report: Report) -> str:
    margin = f"{MARGIN_SHARE:.0%} of the peak + {MARGIN / 1e9:g} GB"
    name = f"{report.gpu.words}: a peak fits with a margin of {margin} (fragmentation; CUDA's context)"
    found = next((v for v in report.verdicts if v.fits), None)
    if found is not None:
        return f"{name}. Largest batch: {found.precision}, {found.largest_batch}."
    smaller = max((v.largest_batch or 0 for v in report.verdicts), default=0)
    if smaller:
        return f"{name}. None fits with batch {report.setting.batch}; with batch {smaller} one does."
    least = min((v.total for v in report.verdicts if v.refused is None), default=0)
    return f"{name}. None fits: the least needs {_gb(needed(least))} GB with the margin."


def _remedy(remedy: tuple[str, Verdict]) -> list[str]:
    words, verdict = remedy
    return [words, verdict.precision, _gb(verdict.total), _word(verdict)]


def _word(verdict: Verdict) -> str:
    return "yes" if verdict.fits else "no"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 1e8 else f"{size / 1e9:.3f}"


def _table(rows: Sequence[Sequence[str]], markdown: bool) -> list[str]:
    return format_table(rows, right=range(1, len(rows[0])), markdown=markdown)
