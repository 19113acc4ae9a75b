"""The README tells the truth about names and figures; tests/site runs its code."""

import json
import re
from pathlib import Path

from tests.representatives import TABLE

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMPARISON = ROOT / "benchmarks" / "results" / "cpu-emulated-2026-11-23" / "compare.json"


def section(title: str) -> str:
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def test_which_name_has_six_rows_of_names_that_exist():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", section("Which name?"), flags=re.MULTILINE)[1:]
    rows = [row for row in rows if "---" not in row[0]]
    assert len(rows) == 6
    words = [word for _, names in rows for word in re.findall(r"`([^`]+)`", names)]
    assert {word for word in words if "=" not in word} <= set(TABLE)


def test_the_figures_are_those_of_their_pages():
    speed = dict(re.findall(r"^\| (.+?) \| ([\d.]+) \|", (ROOT / "docs" / "speed.md").read_text(), flags=re.MULTILINE))
    counted = " ".join(section("Speed and memory").split())
    figures = [speed[row] for row in (
        "`fp8-hybrid-remainder`", "Lightning's `bf16-mixed`, compiled", "torchao by hand, tensorwise, compiled"
    )]  # fmt: skip
    assert re.findall(r"([\d.]+) GB", counted) == figures
    figures = section("Speed and memory")
    page = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("speed", "memory", "evidence")}
    (hybrid,) = re.findall(r"^\| `fp8-hybrid` \| [\d.]+ \| [\d.]+ \| [\d.]+ \| \d+ \| ([\d.]+) ", page["speed"], re.M)
    (best,) = re.findall(r"the best row is predicted at ([\d.]+)\.", page["speed"])
    (missed,) = re.findall(r"\| steps \| \d+ \| ([\d.]+) \|", page["speed"])
    assert re.findall(r"([\d.]+)(?: times as|; such| %)", figures) == [hybrid, best, missed]
    held = re.findall(r"^\| `bf16-(?:mixed|remainder|8bit)`.* \| (\d+) \| [^|]+ \|$", page["memory"], re.M)
    assert re.findall(r"(\d+) under", figures) == held
    (row,) = re.findall(r"^\| fp8-hybrid +\|(.*)", page["evidence"].split("### The gaps")[1].split("\n## ")[0], re.M)
    gaps = [cell.strip() for cell in row.split("|")]
    assert f"byte-level GPT {gaps[0]}, Llama {gaps[1]}," in figures


def test_the_sentence_under_the_picture_is_what_was_compared():
    results = json.loads(COMPARISON.read_text())
    finals = {run["name"]: run["final_val"] for run in results["results"]}
    assert list(finals) == ["32-true", "bf16-mixed", "fp8-hybrid"]
    apart = max(abs(value / finals["32-true"] - 1) for value in finals.values())
    assert f"{100 * apart:.1f} %" in README
    assert f"after {results['spec']['max_steps']} steps" in README
