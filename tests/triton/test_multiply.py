"""The kernel that multiplies gradients: torch's results, and nothing is done where the factor is one."""

import pytest
import torch

from lightning_lowprec.numerics import linear_cross_entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 0.3, 0.0, float("nan")])
def test_products_are_rounded_once(dtype, factor, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "DEVICES", {"cpu"})
    values = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = (values.float() * torch.tensor(factor)).to(dtype)
    version = values._version
    assert linear_cross_entropy.multiply_(values, torch.tensor(factor)) is values
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert values._version > version, "autograd notices a write to what it saved"


def test_a_factor_of_one_writes_nothing(monkeypatch):
    """A NaN with other bits than the usual ones stays as it is, bit for bit."""
    monkeypatch.setattr(linear_cross_entropy, "DEVICES", {"cpu"})
    values = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)
    linear_cross_entropy.multiply_(values, torch.tensor(1.0))
    assert values.view(torch.int32).item() == 0x7FC12345
