"""``lowprec compare``: one model under several precisions, side by side."""

from __future__ import annotations

from typing import Any

from lightning_lowprec.tools.compare.report import REPORT, text
from lightning_lowprec.tools.compare.runner import compare
from lightning_lowprec.tools.compare.spec import CompareSpec
from lightning_lowprec.tools.terminal import prints_to_stderr


def run(args: Any) -> int:
    """Train, then print the table and the path of the report; return 1 if a precision failed or is off the baseline."""
    args = vars(args)
    as_json = args.pop("json")
    with prints_to_stderr(wanted=as_json):
        comparison = compare(CompareSpec(**args))
    if as_json:
        print(comparison.to_json(), end="")
    else:
        print(text(comparison))
        print(comparison.spec.out / REPORT)
    return 0 if comparison.ok else 1
