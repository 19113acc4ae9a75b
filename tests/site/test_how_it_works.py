"""docs/how-it-works.md gives the figures of the formats, and what it says about their errors is true."""

import re

import pytest
import torch

from lightning_lowprec.numerics.tensor_cores import UNITS
from tests.site.pages import DOCS
from tools.site import pictures

PAGE = (DOCS / "how-it-works.md").read_text()


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


def test_a_product_of_random_data_has_28_db():
    torch.manual_seed(0)
    x, weight = torch.randn(256, 512), torch.randn(256, 512)
    rounded = [(t * (448 / t.abs().max())).to(torch.float8_e4m3fn).float() / (448 / t.abs().max()) for t in (x, weight)]
    exact = x @ weight.T
    noise = rounded[0] @ rounded[1].T - exact
    decibels = 20 * torch.log10(exact.norm() / noise.norm())
    assert 27.5 < decibels < 29
    assert f"about {decibels:.0f} dB" in " ".join(PAGE.split())
    assert f"the error is {100 * noise.norm() / exact.norm():.0f} % of" in " ".join(PAGE.split())


@pytest.mark.slow
def test_the_pictures_are_drawn_anew(tmp_path):
    assert pictures.main([str(tmp_path)]) == 0
    for name in ("grids.png", "errors.png", "sums.png"):
        assert (tmp_path / name).stat().st_size > 20_000
        assert (DOCS / "pictures" / name).stat().st_size > 20_000


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


def test_values_2_to_the_15_smaller_than_the_largest_lose_more_than_the_others_in_e4m3():
    errors = pictures.spacing(pictures.values("float8_e4m3fn"), 448 * torch.tensor([2.0**-8, 2.0**-15.5]))
    assert errors[0] <= 2**-4 < errors[1]
    assert "the whole tensor, if other values are 2^15 times smaller" in PAGE
