"""The kernel that encodes the rows of each group along the rows, against torch's own operations."""

import pytest
import torch

from lightning_lowprec.numerics import grouped_fp8
from lightning_lowprec.numerics.grouped_fp8 import encode_columns


def by_hand(rows, ends, power_of_2):
    """torchao's formula, group by group, in float64."""
    codes = torch.zeros(rows.shape[1], rows.shape[0])
    inverse = torch.empty(len(ends), rows.shape[1])
    start = 0
    for number, end in enumerate(ends):
        part = rows[start:end].double()
        scale = 448 / part.abs().amax(0).clamp(min=1e-12)
        if power_of_2:
            scale = 2.0 ** torch.floor(torch.log2(scale))
        scale = scale.float()
        codes[:, start:end] = (part.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float().t()
        inverse[number] = 1 / scale
        start = end
    return codes, inverse


@pytest.fixture(params=["kernel", "torch"])
def way(request, monkeypatch):
    monkeypatch.setattr(grouped_fp8, "DEVICES", {"cpu"} if request.param == "kernel" else set())
    monkeypatch.setattr(grouped_fp8, "kernels_run", lambda: True)


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_of_each_group(dtype, power_of_2, way):
    rows = torch.randn(192, 80, generator=torch.Generator().manual_seed(0)) * 3
    rows[20:32] = 0  # zero rows, and a group of nothing else
    rows[96:112] = 0
    rows, ends = rows.to(dtype), [32, 96, 112, 176]
    codes, inverse = encode_columns(rows, torch.tensor(ends, dtype=torch.int32), power_of_2)
    expected, scales = by_hand(rows, ends, power_of_2)
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(codes[:, :176].float(), expected[:, :176])
    torch.testing.assert_close(inverse, scales, rtol=0 if power_of_2 else 1e-6, atol=0)


def test_a_nan_reaches_the_scale_of_its_group_and_column_alone(way):
    rows = torch.ones(64, 16)
    rows[40, 3] = torch.nan
    codes, inverse = encode_columns(rows, torch.tensor([32, 48], dtype=torch.int32), False)
    assert inverse[1, 3].isnan()
    assert inverse.isnan().sum() == 1
    assert codes[3, 32:48].float().isnan().all()
    assert codes[:, :48].float().isnan().sum() == 16
