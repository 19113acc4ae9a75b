"""Tables of the docs have the figures of the formats, of the units and of the committed runs."""

import json
import re
from statistics import mean, stdev

import pytest

from lightning_lowprec.numerics.tensor_cores import UNITS
from tests.site.pages import DOCS
from tools.site import pictures

PAGE = (DOCS / "how-it-works.md").read_text()
RESULTS = DOCS.parent / "benchmarks" / "results"


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn", "int8"])
def test_the_table_of_formats(name):
    bits, largest, smallest = re.search(
        rf"^\| `{name}` \| (.+?) \| (.+?) \| (.+?) \|", PAGE, flags=re.MULTILINE
    ).groups()
    grid = pictures.values(name)
    assert float(largest) == grid.max()
    assert (2.0 ** int(smallest[2:]) if "^" in smallest else float(smallest)) == grid[grid > 0].min()
    if name.startswith("float"):
        assert re.search(r"e(\d)m(\d)", name).groups() == tuple(bits.split(", "))


@pytest.mark.slow
@pytest.mark.parametrize("row", re.findall(r"\n\| ([^|]+) \| ([\d,]+) \| (\d+) dB \| (.*) \| (\d+) dB \|", PAGE))
def test_the_table_of_sums_says_what_is_computed(row):
    data, k, of_rounding, fast, of_promoted = row
    rounding, of_fast, promoted, slope = pictures.lost_on_hopper(data, int(k.replace(",", "")))
    assert (f"{rounding:.0f}", f"{promoted:.0f}") == (of_rounding, of_promoted)
    loss = f", {-100 * slope:.1f} % too small" if slope < -0.01 else ""
    assert fast.replace("*", "") == f"{of_fast:.0f} dB{loss}"


def test_the_table_of_gpus_is_the_table_of_units():
    rows = re.findall(r'\n\| `"(\w+)"` \| [^|]+ \| (\d+)[^|]* \| (\d+)', PAGE)
    assert rows == [(name, str(unit.block), str(unit.places)) for name, unit in UNITS.items()]


def test_the_table_shows_every_layer_that_loses_more_than_1_db():
    rows = json.loads((RESULTS / "cpu-2026-11-26" / "sums" / "layers.json").read_text())
    wanted = []
    for row in sorted((row for row in rows if row["lost"] > 1.0), key=lambda row: -row["lost"]):
        layer = ".".join(row["layer"].split(".")[-2:])
        noise = [f"{row[name]:.0f} dB" for name in ("rounding", "fast", "promoted")]
        wanted.append([row["architecture"], layer, f"{row['k']:,}", row["weights"], *noise, f"{row['lost']:.1f} dB"])
    page = PAGE.split("### Layers of 20 architectures")[1].split("\n#")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    assert table[2:] == wanted


def test_the_losses_on_the_page_on_speed_are_those_of_the_committed_runs():
    rows = re.findall(r"^\| ([^|]+) \| (\d\.\d+) \| (\d\.\d+) \|$", (DOCS / "speed.md").read_text(), re.MULTILINE)
    levels = json.loads((RESULTS / "cpu-emulated-2026-11-20" / "msamp_levels.json").read_text())
    heads = json.loads((RESULTS / "cpu-emulated-2026-11-22" / "head_levels.json").read_text())
    runs = {"float32" if name == "fp32" else f"MS-AMP {name}": [run["val_loss"] for run in seeds.values()]
            for name, seeds in levels["optimizers"]["adamw"]["runs"].items()}  # fmt: skip
    runs |= {name: list(seeds.values()) for name, seeds in heads["runs"].items()}
    assert rows == [(name, f"{mean(losses):.3f}", f"{stdev(losses):.3f}") for name, losses in runs.items()]
