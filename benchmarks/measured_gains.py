"""Write the table of gains that plans and ``min_gain`` use, from the measurements of the GPU lane.

    python -m benchmarks.measured_gains benchmarks/results/FOLDER/gains.json

Writes ``lightning_lowprec/conversion/measured_gains.py``, with the device and the date in ``SOURCE``. For
every torchao recipe the ratio of device times is used, because in a training step the host runs ahead of the GPU.
Figures of toy sizes are refused, unless ``--out`` names another file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_lane.linear_runs import TORCHAO

TABLE = Path(__file__).parents[1] / "lightning_lowprec" / "conversion" / "measured_gains.py"
HEAD = '''"""Measured gains of FP8 over bf16 by shape, written by ``python -m benchmarks.measured_gains``.

{what}
"""

SOURCE: str | None = {source}
GAINS: dict[str, dict[tuple[int, int, int], float]] = {gains}
"""By recipe: (tokens, in_features, out_features) -> how many times faster than bf16, forward and backward."""
'''
EMPTY = HEAD.format(
    what="The table is empty: nothing has been measured on a GPU yet, and ``gains`` uses published figures.",
    source="None",
    gains="{}",
)


def render(entries: Sequence[dict[str, Any]]) -> str:
    """Return the source of the module for the entries of one ``gains.json``.

    Raises:
        ValueError: entries of several devices, or none of a recipe that ``gains`` knows.
    """
    devices = sorted({str(entry["device"]) for entry in entries})
    if len(devices) != 1:
        raise ValueError(f"one table is of one device, got {', '.join(devices) or 'no entries'}.")
    recipes: dict[str, list[str]] = {}
    for entry in entries:
        if entry["backend"] == "torchao" and entry["recipe"] in TORCHAO:
            shape = (entry["tokens"], entry["in_features"], entry["out_features"])
            recipes.setdefault(entry["recipe"], []).append(f"        {shape}: {float(entry['ratio'])!r},\n")
    if not recipes:
        raise ValueError(f"no entry is of torchao's recipes {', '.join(TORCHAO)}.")
    tables = "".join(f'    "{recipe}": {{\n{"".join(lines)}    }},\n' for recipe, lines in recipes.items())
    date = max(entry["date"] for entry in entries)
    return HEAD.format(
        what="In milliseconds on the device, launches hidden; see ``benchmarks/results``.",
        source=json.dumps(f"measured on one {devices[0]}, {date}"),
        gains=f"{{\n{tables}}}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if the table was written, 2 if the file has no usable entries."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measured_gains", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("file", type=Path, help="gains.json of the GPU lane")
    parser.add_argument("--out", type=Path, default=TABLE, help="write there instead")
    args = parser.parse_args(argv)
    try:
        entries = json.loads(args.file.read_text())
        if args.out == TABLE and any(entry["smoke"] for entry in entries):
            raise ValueError("these figures are of toy sizes (`--smoke`); nothing must go by them.")
        text = render(entries)
    except (OSError, ValueError, KeyError) as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 2
    args.out.write_text(text)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
