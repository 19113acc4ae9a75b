"""``lowprec plan MODEL --fits 141GB``: which precisions train the model within the memory of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from lightning_lowprec.tools import strict_json
from lightning_lowprec.tools.class_path import build
from lightning_lowprec.tools.planning.fits import (
    DEFAULT_NAMES,
    MARGIN,
    MARGIN_SHARE,
    Report,
    Verdict,
    fits,
    needed,
)
from lightning_lowprec.tools.planning.memory_meter import CATEGORIES
from lightning_lowprec.tools.planning.pages import Table, page
from lightning_lowprec.tools.planning.simulated_step import loaded_in_half
from lightning_lowprec.tools.planning.source import load
from lightning_lowprec.tools.terminal import prints_to_stderr, working

STRATEGIES: Final = ("fsdp2",)


def run(args: Any) -> int:
    """Print the report; return 1 if no precision fits."""
    if args.strategy is not None and args.strategy not in STRATEGIES:
        raise ValueError(f"`strategy={args.strategy!r}` is not valid; expected one of: {', '.join(STRATEGIES)}.")
    if args.devices > 1 and args.strategy is None:
        raise ValueError(
            f"`devices={args.devices}` needs `--strategy fsdp2`: other strategies hold all of the model on every GPU,"
            " so leave `--devices` out for them."
        )
    if args.source is None:
        raise ValueError("`source` is missing: give a model, such as a folder with a config.json or my.py:Model.")
    names = tuple(args.precisions.split(",")) if args.precisions else DEFAULT_NAMES
    with working("building the model") as shown, prints_to_stderr(wanted=args.json):
        source = load(args.source, args.args or {})
        report = fits(
            source.model, args.fits, names=names, batch=args.batch, sequence=args.seq, fused=args.fused,
            checkpointing=args.checkpointing, devices=args.devices,
            data=_first_batch(args.data, args.data_args or {}), progress=lambda words: shown.say(f"simulating {words}"),
        )  # fmt: skip
    if args.markdown is not None:
        Path(args.markdown).write_text(f"{fits_page(report, source.origin, markdown=True)}\n", encoding="utf-8")
    print(strict_json.dumps(_json(report, source.origin)) if args.json else fits_page(report, source.origin))
    return 0 if any(verdict.fits for verdict in report.verdicts) else 1


def _first_batch(path: str | None, arguments: Mapping[str, Any]) -> Any:
    if path is None:
        return None
    data = build(path, arguments, seed=0)
    if hasattr(data, "prepare_data"):
        data.prepare_data()
        data.setup("fit")
    loader = data.train_dataloader() if hasattr(data, "train_dataloader") else data
    return next(iter(loader))


def _json(report: Report, origin: str) -> dict[str, Any]:
    return {
        "source": origin,
        "simulated": True,
        "devices": report.setting.devices,
        **asdict(report),
        "verdicts": [{**asdict(verdict), "total": verdict.total} for verdict in report.verdicts],
        "remedies": [{"change": words, **asdict(v), "total": v.total} for words, v in report.remedies],
        "margin": {"share": MARGIN_SHARE, "bytes": MARGIN},
    }


def fits_page(report: Report, origin: str, *, markdown: bool = False) -> str:
    """Return the report of ``--fits``."""
    verdicts = [verdict for verdict in report.verdicts if verdict.refused is None]
    rows = [
        [
            verdict.precision, *(_gigabytes(verdict.peak[category]) for category in CATEGORIES),
            _gigabytes(verdict.total), verdict.at.split()[0], _yes_or_no(verdict), str(verdict.largest_batch),
        ]
        for verdict in verdicts
    ]  # fmt: skip
    remedies = [[change, v.precision, _gigabytes(v.total), _yes_or_no(v)] for change, v in report.remedies]
    parts: list[Table | Sequence[str]] = [
        _heading(report, origin),
        Table([["precision (GB)", *CATEGORIES, "peak", "in", "fits", "largest batch"], *rows]),
        [_conclusion(report)],
    ]
    if remedies:
        parts += [
            ["What would need less, simulated (GB):"],
            Table([["change", "precision", "peak", "fits"], *remedies]),
        ]
    parts.append([f"not simulated: {v.precision}: {v.refused}" for v in report.verdicts if v.refused is not None])
    return page(parts, markdown=markdown)


def _heading(report: Report, origin: str) -> list[str]:
    setting = report.setting
    shape = f"batch {setting.batch} per GPU" + (f", {setting.sequence} tokens" if setting.sequence is not None else "")
    optimizer = f"AdamW ({'fused' if setting.fused else 'foreach, the default of torch'})"
    blocks = ", blocks computed again in the backward" if setting.checkpointing else ""
    ranks = f"; {setting.devices} GPUs, strategy='fsdp2', figures of one" if setting.devices > 1 else ""
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
    if setting.devices > 1:
        lines.append(
            "State per GPU and gathered weights are computed, activations simulated; gathered weights: at most."
        )
    return lines


def _conclusion(report: Report) -> str:
    margin = f"{MARGIN_SHARE:.0%} of the peak + {MARGIN / 1e9:g} GB"
    gpu = f"{report.gpu.words}: a peak fits with a margin of {margin} (fragmentation; CUDA's context)"
    best = next((v for v in report.verdicts if v.fits), None)
    if best is not None:
        return f"{gpu}. Largest batch: {best.precision}, {best.largest_batch}."
    smaller = max((v.largest_batch or 0 for v in report.verdicts), default=0)
    if smaller:
        return f"{gpu}. None fits with batch {report.setting.batch}; with batch {smaller} one does."
    least = min((v.total for v in report.verdicts if v.refused is None), default=0)
    return f"{gpu}. None fits: the least needs {_gigabytes(needed(least))} GB with the margin."


def _yes_or_no(verdict: Verdict) -> str:
    return "yes" if verdict.fits else "no"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 1e8 else f"{size / 1e9:.3f}"
