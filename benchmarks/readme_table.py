"""Write the README's performance section from the committed results.

    python -m benchmarks.readme_table [--check]

The section stands between two markers and has, for every device, the newest folder of ``benchmarks/results``. Without
such a folder the section says that nothing has been measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_lane import figures, targets
from benchmarks.gpu_lane.contenders import BASELINE, MAIN, MAIN_TE, SHARDED
from benchmarks.gpu_lane.figures import number, table
from benchmarks.gpu_lane.results import FILE, means_nothing

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
BEGIN = "<!-- performance: written by `python -m benchmarks.readme_table` -->"
END = "<!-- performance: end -->"
NOTHING = (
    "Nothing has been measured on a GPU yet. `make gpu-lane` measures on a machine with an FP8 GPU;\n"
    f"[{RESULTS}]({RESULTS}/README.md) says how the figures get here."
)
SHOWN = (
    BASELINE, "lightning bf16-true, compiled", MAIN_TE, MAIN, "ours fp8-rowwise", SHARDED,
    "torchao tensorwise, compiled", "te delayed", "accelerate torchao, compiled", "accelerate te",
    "lightning transformer-engine",
)  # fmt: skip
"""The rows of the table; the report has all rows."""


def section(root: Path) -> str:
    """Return the text between the markers.

    Raises:
        ValueError: results of toy sizes, or of several devices in one folder.
    """
    newest: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for path in (root / RESULTS).glob(f"*/{FILE}"):
        data = json.loads(path.read_text())
        device = _device(data, path.parent.name)
        found = (max(run["date"] for run in data["runs"]), path.parent.name, data)
        newest[device] = max(newest.get(device, found), found, key=lambda entry: entry[:2])
    ordered = sorted(newest.items(), key=lambda item: item[1][:2], reverse=True)
    return "\n\n".join(_of_device(device, *entry) for device, entry in ordered) or NOTHING


def _device(data: dict[str, Any], folder: str) -> str:
    devices = {str(run["machine"].get("device")) for run in data["runs"]}
    if len(devices) != 1:
        raise ValueError(f"{folder} is of several devices: {', '.join(sorted(devices))}.")
    for why in filter(None, map(means_nothing, data["runs"])):
        raise ValueError(f"{folder} has figures of {why}, which mean nothing.")
    return devices.pop()


def _of_device(device: str, date: str, folder: str, data: dict[str, Any]) -> str:
    """Return the text of one device: the source of the figures, the steps, and how many targets are met."""
    versions = data["runs"][-1]["machine"].get("versions", {})
    used = ", ".join(f"{name} {versions[name]}" for name in ("torch", "torchao", "transformer-engine", "lightning")
                     if versions.get(name))  # fmt: skip
    commits = ", ".join(dict.fromkeys(run["commit"] for run in data["runs"]))
    verdicts = [target["met"] for target in targets.targets(data)]
    return "\n\n".join(filter(None, (
        f"**{device}**, {date}{', ' + used if used else ''}, commit {commits}:",
        table_of_steps(data),
        f"How many times faster than Lightning's bf16-mixed with compiled blocks is in brackets. Of the lane's targets"
        f" {verdicts.count(True)} are met, {verdicts.count(False)} missed, {verdicts.count(None)} not measured:"
        f" [all figures]({RESULTS}/{folder}/report.md).",
    )))  # fmt: skip


def table_of_steps(data: dict[str, Any]) -> str:
    """Return the table of tokens per second, with the ratio to the baseline, and of memory; empty without steps."""
    steps = figures.comparable(data, "step8b")
    if not steps:
        return ""
    layers = next(iter(steps.values())).get("layers")  # the stack has half of the layers on 80 GB
    model = "8B-shaped stack" if layers is None else f"8B-shaped stack of {layers} layers"
    speedups = figures.speedups(steps)
    rows = []
    for name in SHOWN:
        if name in steps:
            ratio, peak = speedups.get(name), steps[name].get("peak_bytes")
            speed = f"{steps[name]['tokens_per_s']:.0f}{'' if ratio is None else f' ({ratio:.2f}x)'}"
            memory = number(None if peak is None else peak / 1e9, 1)
            rows.append((f"**{name}**" if name.startswith("ours") else name, speed, memory))
    return table(("", f"{model}, tokens/s", "peak GB"), rows)


def updated(readme: str, root: Path) -> str:
    """Return the README with a new section.

    Raises:
        ValueError: the markers are not there, once each and in order, or results that do not belong in a README.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in before or END in after:
        raise ValueError(f"the README needs the lines {BEGIN!r} and {END!r}, once each.")
    return f"{before}{begin}\n{section(root)}\n{end}{after}"


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Return 0 if the README is up to date now, 1 if it is not (``--check``), 2 if it cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readme_table", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true", help="write nothing; the exit status is 1 if the README is out of date"
    )
    args = parser.parse_args(argv)
    path = root / "README.md"
    readme = path.read_text()
    try:
        new = updated(readme, root)
    except (OSError, ValueError, KeyError) as error:
        print(error, file=sys.stderr)
        return 2
    if args.check:
        return int(new != readme)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
