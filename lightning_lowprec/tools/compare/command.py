"""``lowprec compare``: one model under several precisions, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from lightning_lowprec.tools.compare.report import REPORT, text
from lightning_lowprec.tools.compare.runner import compare
from lightning_lowprec.tools.compare.spec import DEFAULT_PRECISIONS, CompareSpec
from lightning_lowprec.tools.terminal import prints_to_stderr


def run(argv: Sequence[str]) -> int:
    """Train, then print the table and the path of the report; return 1 if a precision failed or is off the baseline."""
    parser = ArgumentParser(
        prog="lowprec compare",
        description="Train one model under several precisions, with the same data and the same seed, one process per"
        " precision. Report losses, step times and memory side by side. The exit status is 1 if a precision fails, or"
        " if its final validation metric differs from that of the first precision by more than --max-loss-gap. With"
        " --seeds the runs of each seed are compared in pairs, and the whole confidence interval of their differences"
        " must be within --max-loss-gap. Without options a small byte-level GPT trains on the sources of Python's"
        " standard library, in about two minutes on two CPU cores.",
    )
    default = ",".join(DEFAULT_PRECISIONS)
    parser.add_argument("--precisions", type=str, default=default, help="comma separated; the first is the baseline")
    parser.add_class_arguments(CompareSpec, as_group=False, skip={"precisions", "monitor", "force"})
    parser.add_argument(
        "--monitor",
        action="store_true",
        help="sample what FP8 takes from every layer: a folder for `lowprec monitor` per run",
    )
    parser.add_argument("--force", action="store_true", help="write over the report of an earlier comparison")
    parser.add_argument("--json", action="store_true", help="print JSON: the content of results.json")
    args = vars(parser.parse_args(argv))
    as_json = args.pop("json")
    args["precisions"] = [name.strip() for name in args["precisions"].split(",")]
    with prints_to_stderr(wanted=as_json):
        comparison = compare(CompareSpec(**args))
    if as_json:
        print(comparison.to_json(), end="")
    else:
        print(text(comparison))
        print(comparison.spec.out / REPORT)
    return 0 if comparison.ok else 1
