"""Count contenders in a process on the null GPU, one JSON file each. Started by ``python -m benchmarks.ledger``."""

from __future__ import annotations

import argparse
import json
import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path

DIRTY = 3
"""Exit status: memory was left behind, the contenders that are not done yet need a new process."""
LEFT_BEHIND = 64 << 20


def file_of(out: Path, contender: str) -> Path:
    """Return the file of a contender's entry."""
    return out / "entries" / (re.sub(r"[^\w.=-]+", "_", contender) + ".json")


def main() -> int:
    """Count the contenders that have no file yet."""
    import torch

    from benchmarks.ledger.step import measure
    from benchmarks.ledger.untuned import take_first_variant
    from benchmarks.rivals import contenders, models

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("contenders", nargs="+")
    chosen = parser.parse_args()
    take_first_variant()
    shape = models.SHAPES[chosen.shape]
    if chosen.layers is not None:
        shape = replace(shape, layers=chosen.layers)
    for key in chosen.contenders:
        file = file_of(chosen.out, key)
        if file.exists():
            continue
        contender = contenders.find(key)
        reason = contender.missing(torch.device("cuda"))
        if reason is None:
            try:
                found = measure(key, contender.setup, shape, batch=chosen.batch).to_json()
            except Exception as error:
                traceback.print_exc()
                found = {"missing": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
        else:
            found = {"missing": reason}
        file.write_text(json.dumps(found))
        if torch.cuda.memory_allocated() > LEFT_BEHIND:
            return DIRTY
    return 0


if __name__ == "__main__":
    sys.exit(main())
