"""docs/speed.md shows the committed figures."""

import json
import re
from statistics import mean, stdev

from tests.site.pages import DOCS, ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGE = (DOCS / "speed.md").read_text()


def shown() -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| ([^|]+) \| (\d\.\d+) \| (\d\.\d+) \|$", PAGE, flags=re.MULTILINE)
    return {name: (loss, deviation) for name, loss, deviation in rows}


def test_the_losses_are_those_of_the_committed_runs():
    levels = json.loads((RESULTS / "cpu-emulated-2026-11-20" / "msamp_levels.json").read_text())
    heads = json.loads((RESULTS / "cpu-emulated-2026-11-22" / "head_levels.json").read_text())
    runs = {"float32" if name == "fp32" else f"MS-AMP {name}": [run["val_loss"] for run in seeds.values()]
            for name, seeds in levels["optimizers"]["adamw"]["runs"].items()}  # fmt: skip
    runs |= {name: list(seeds.values()) for name, seeds in heads["runs"].items()}
    assert shown() == {name: (f"{mean(losses):.3f}", f"{stdev(losses):.3f}") for name, losses in runs.items()}
    assert levels["steps"] == heads["steps"] == 500


def test_the_picture_is_the_committed_one():
    committed = RESULTS / "null-gpu-2026-11-24" / "ledger.png"
    assert (DOCS / "pictures" / "ledger.png").read_bytes() == committed.read_bytes()
