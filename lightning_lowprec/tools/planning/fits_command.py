"""``lowprec plan MODEL --fits 141GB``: which precisions train the model within the memory of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from lightning_lowprec.tools import strict_json
from lightning_lowprec.tools.class_path import build
from lightning_lowprec.tools.planning.fits import DEFAULT_NAMES, MARGIN, MARGIN_SHARE, Report, fits
from lightning_lowprec.tools.planning.fits_text import text
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
        Path(args.markdown).write_text(f"{text(report, source.origin, markdown=True)}\n", encoding="utf-8")
    print(strict_json.dumps(_json(report, source.origin)) if args.json else text(report, source.origin))
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
        **asdict(report),
        "verdicts": [{**asdict(verdict), "total": verdict.total} for verdict in report.verdicts],
        "remedies": [{"change": words, **asdict(v), "total": v.total} for words, v in report.remedies],
        "margin": {"share": MARGIN_SHARE, "bytes": MARGIN},
    }
