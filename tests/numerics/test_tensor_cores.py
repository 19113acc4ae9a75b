"""Sums of float8 products as GPUs add them up, against two models by other people and against exact sums."""

import pytest
import torch

from tests.numerics.tensor_core_judges import E4M3, PAIRS, accumulate, differing, differing_mx, differing_products

pytest.importorskip("mmasim")
pytest.importorskip("mmaemu")


@pytest.mark.parametrize(("on", "of_a", "of_b"), PAIRS)
def test_sums_are_mma_sims_bit_for_bit(on, of_a, of_b):
    different, compared = differing(on, of_a, of_b, 25_000)
    assert different == 0
    assert compared >= 25_000


def test_sums_with_scales_per_block_are_mma_sims_bit_for_bit():
    assert differing_mx(25_000)[0] == 0
    a, b = (torch.randn(rows, 64).to(E4M3) for rows in (16, 1500))  # which are multiplied some at a time
    bits = (120 + torch.arange(2 * len(codes)).view(-1, 2) % 9 for codes in (a, b))
    of_a, of_b = (scale.to(torch.uint8).view(torch.float8_e8m0fnu) for scale in bits)
    parts = [accumulate(a, b[at], "blackwell", False, of_a, of_b[at]) for at in (slice(700), slice(700, None))]
    assert torch.equal(accumulate(a, b, "blackwell", False, of_a, of_b), torch.cat(parts, 1))


@pytest.mark.slow
def test_products_are_those_of_mmaemus_h100_where_it_splits_k_too():
    different, split = differing_products(12, largest=1 << 21)
    assert different == 0
    assert split >= 2


def test_sums_of_one_sign_are_not_too_small_on_blackwell():
    torch.manual_seed(0)
    codes = torch.randn(32, 14336).abs().to(E4M3)
    exact = codes.double() @ codes.double().t()
    sums = accumulate(codes, codes, "blackwell", True).double()
    slope = float((sums * exact).sum() / exact.square().sum())  # by least squares
    assert abs(slope - 1) < 1e-5
