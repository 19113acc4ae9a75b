"""``lowprec compare``: one model under several precisions, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_lowprec.tools.compare.runner import compare
from lightning_lowprec.tools.compare.spec import DEFAULT_PRECISIONS, CompareSpec
from lightning_lowprec.tools.compare.table import render


def run(argv: list[str]) -> int:
    """Train, print the table and where the report is; 1 if a precision failed or ended off the baseline."""
    args = _parser().parse_args(argv)
    values = {name.replace("-", "_"): value for name, value in vars(args).items()}
    values["precisions"] = [name.strip() for name in args.precisions.split(",")]
    values["out"] = Path(args.out)
    comparison = compare(CompareSpec(**values))
    print(render(comparison))
    print(comparison.report)
    return 0 if comparison.ok else 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lowprec compare",
        description="Train one model on the same data from the same seed under several precisions, each in a process of"
        " its own, and report losses, step times and peak memory side by side. Exits 1 if a precision fails or its"
        " final validation metric is off the first precision's by more than --max-loss-gap. The defaults need nothing:"
        " a small byte-level GPT on the sources of Python's standard library, about two minutes on two CPU cores.",
    )
    default = CompareSpec()
    names = ",".join(DEFAULT_PRECISIONS)
    add = parser.add_argument
    add("--precisions", type=str, default=names, help="comma separated; the first is the baseline of the others")
    add("--model", type=str, default=default.model, help="a LightningModule: package.Class or path/to/file.py:Class")
    add("--model-args", type=dict[str, Any], default={}, help="its arguments: JSON or YAML, e.g. '{depth: 2}'")
    add("--data", type=str, default=default.data, help="a LightningDataModule, written like --model")
    add("--data-args", type=dict[str, Any], default={}, help="its arguments, written like --model-args")
    add("--max-steps", type=int, default=default.max_steps, help="optimizer steps of each training")
    add("--val-every", type=int, default=default.val_every, help="validate every so many batches, and at the end")
    add("--val-batches", type=int, default=default.val_batches, help="batches of each validation")
    add("--val-metric", type=str, default=default.val_metric, help="the logged metric that is compared")
    add("--max-loss-gap", type=float, default=default.max_loss_gap, help="largest relative difference, 0.01 is 1 %%")
    add("--seed", type=int, default=default.seed, help="of the model, and of the data if it takes a `seed`")
    add("--accelerator", type=str, default=default.accelerator, help="auto, cpu, cuda, ...; one device is used")
    add("--threads", type=int, default=default.threads, help="CPU threads; 0 leaves torch's default")
    add("--out", type=str, default=str(default.out), help="folder for the report, the picture, the figures, the logs")
    return parser
