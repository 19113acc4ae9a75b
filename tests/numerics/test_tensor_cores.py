"""Sums of float8 products as GPUs add them up, against two models by other people and against exact sums."""

import pytest
import torch

from lightning_lowprec.numerics.tensor_cores import accumulate
from tests.numerics.tensor_core_judges import E4M3, PAIRS, differing, differing_mx, differing_products

pytest.importorskip("mmasim")
pytest.importorskip("mmaemu")


@pytest.mark.parametrize(("on", "of_a", "of_b"), PAIRS)
def test_sums_are_mma_sims_bit_for_bit(on, of_a, of_b):
    different, compared = differing(on, of_a, of_b, 25_000)
    assert different == 0
    assert compared >= 25_000


def test_sums_with_scales_per_block_are_mma_sims_bit_for_bit():
    assert differing_mx(25_000)[0] == 0


@pytest.mark.slow
def test_products_are_those_of_mmaemus_h100_where_it_splits_k_too():
    different, split = differing_products(12, largest=1 << 21)
    assert different == 0
    assert split >= 2


def db(sums, exact):
    return float(10 * torch.log10(exact.square().sum() / (sums.double() - exact).square().sum()))


def slope(sums, exact):
    """Return how much larger sums are than exact ones, by least squares."""
    return float((sums.double() * exact).sum() / exact.square().sum()) - 1


def coded(values):
    """Return e4m3 codes with one scale, and what they stand for in float64."""
    codes = (values * (448 / values.abs().max())).to(E4M3)
    return codes, codes.double()


def on_hopper(a, b):
    """Return sums with fast accumulation, with promotion, and exact."""
    (of_a, exact_a), (of_b, exact_b) = coded(a), coded(b)
    return accumulate(of_a, of_b, "hopper", True), accumulate(of_a, of_b, "hopper", False), exact_a @ exact_b.t()


@pytest.mark.slow
def test_hopper_loses_what_was_reported():
    """Figures of a first trial in numpy, with e4m3 codes of one scale: in dB, and as a share of the value."""
    torch.manual_seed(0)
    fast, promoted, exact = on_hopper(torch.randn(128, 4096), torch.randn(128, 4096))
    assert db(fast, exact) == pytest.approx(57.9, abs=0.5)
    assert db(promoted, exact) == pytest.approx(77.8, abs=0.5)

    gated = torch.nn.functional.silu(torch.randn(64, 14336)) * torch.randn(64, 14336)
    fast, promoted, exact = on_hopper(gated, torch.randn(64, 14336))
    assert db(fast, exact) == pytest.approx(49.7, abs=0.5)
    assert db(promoted, exact) == pytest.approx(74.7, abs=0.5)

    squared = torch.randn(64, 16384).relu().square()
    fast, promoted, exact = on_hopper(squared, torch.randn(64, 16384) + 0.2)
    assert db(fast, exact) == pytest.approx(34.8, abs=1)
    assert slope(fast, exact) == pytest.approx(-0.018, abs=0.002)
    assert db(promoted, exact) == pytest.approx(81.9, abs=0.5)

    for k, expected in ((4096, -0.071), (14336, -0.21)):
        fast, promoted, exact = on_hopper(torch.randn(32, k).abs(), torch.randn(32, k).abs())
        assert slope(fast, exact) == pytest.approx(expected, rel=0.1)
        assert abs(slope(promoted, exact)) < 0.001


def test_blackwell_and_mi300_do_not():
    torch.manual_seed(0)
    codes = torch.randn(32, 14336).abs().to(E4M3)
    for on, dtype in (("blackwell", E4M3), ("mi300", torch.float8_e4m3fnuz)):
        same = codes.float().to(dtype)
        exact = same.double() @ same.double().t()
        assert abs(slope(accumulate(same, same, on, True), exact)) < 1e-5
