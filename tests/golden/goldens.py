"""The runs that have goldens, and the file that keeps them."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_lowprec.names import TABLE
from tests.fsdp2 import ranks
from tests.golden import runs

FILE = Path(__file__).parent / "golden.json"
TWO_RANKS = [
    ("fp8-hybrid", "ddp"),
    ("fp8-hybrid", "fsdp2"),
    ("fp8-hybrid-remainder", "fsdp2"),
    ("fp8-rowwise", "fsdp2"),
    ("fp8-lean", "fsdp2"),
    ("bf16-remainder", "fsdp2"),
    ("int8-mixed", "fsdp2"),
    ("msamp-o2", "ddp"),
]
"""Precision and strategy of the runs on two ranks."""


def names() -> list[str]:
    """The names that train on a CPU without Transformer Engine; of names that mean the same plugin, one."""
    seen: list[Any] = []
    chosen = []
    for name, row in TABLE.items():
        what = row.plugin, row.options
        if row.plugin.__name__ != "FP8TE" and what not in seen:
            seen.append(what)
            chosen.append(name)
    return chosen


def measured() -> dict[str, Any]:
    """Run everything; return the content of the file."""
    found = {name: runs.train(0, name) for name in names()}
    with TemporaryDirectory() as folder:
        by_rank = ranks.run(runs.worlds, 2, Path(folder), TWO_RANKS)
    for (name, strategy), *of_ranks in zip(TWO_RANKS, *by_rank, strict=True):
        found |= {f"{name}, {strategy}, rank {rank}": run for rank, run in enumerate(of_ranks)}
    return {"arithmetic": runs.arithmetic(), "runs": found}


def write(path: str) -> None:
    """Write the content to a file."""
    Path(path).write_text(json.dumps(measured()))
