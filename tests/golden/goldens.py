"""The runs that have goldens, and the file that keeps them."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fsdp2 import ranks
from tests.golden import runs
from tests.representatives import names_on_cpu

FILE = Path(__file__).parent / "golden.json"
TWO_RANKS = [
    ("fp8-hybrid", "ddp"),
    ("fp8-hybrid", "fsdp2"),
    ("fp8-hybrid-remainder", "fsdp2"),
    ("fp8-rowwise", "fsdp2"),
    ("bf16-remainder", "fsdp2"),
    ("int8-mixed", "fsdp2"),
    ("msamp-o2", "ddp"),
]
"""Precision and strategy of the runs on two ranks."""


def measured() -> dict[str, Any]:
    """Run everything; return the content of the file."""
    found = {name: runs.train(0, name) for name in names_on_cpu()}
    with TemporaryDirectory() as folder:
        by_rank = ranks.run(runs.worlds, 2, Path(folder), TWO_RANKS)
    for (name, strategy), *of_ranks in zip(TWO_RANKS, *by_rank, strict=True):
        found |= {f"{name}, {strategy}, rank {rank}": run for rank, run in enumerate(of_ranks)}
    return {"arithmetic": runs.arithmetic(), "runs": found}


def add() -> None:
    """Measure what the file does not have yet; these runs say on which CPU they were made."""
    content = json.loads(FILE.read_text())
    for name in names_on_cpu():
        if name not in content["runs"]:
            content["runs"][name] = {**runs.train(0, name), "arithmetic": runs.arithmetic()}
    FILE.write_text(json.dumps(content, indent=1) + "\n")


def write(path: str) -> None:
    """Write the content to a file."""
    Path(path).write_text(json.dumps(measured()))
