"""NVFP4 of ``products/nvfp4.py``: bit for bit the codes of Transformer Engine's reference quantizer, in plain torch."""

import pytest
import torch
from transformer_engine.pytorch.custom_recipes import gemm
from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import nvfp4_ref_rht_2d_factory
from transformer_engine.pytorch.quantization import QuantizerRole

from lightning_lowprec.products.nvfp4 import NVFP4


def matrix(rows, columns, spread, dtype):
    made = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=made) * torch.exp(spread * torch.randn(rows, 1, generator=made))
    x[3], x[5] = 0, 1e-6 * x[5]
    return x.to(dtype)


def quantizer(role):
    return nvfp4_ref_rht_2d_factory(QuantizerRole(module_type="linear", tensor_type=role))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [0.0, 2.0])
@pytest.mark.parametrize("role", ["input", "weight", "gradient"])
def test_codes_scales_and_amax_are_those_of_the_reference_in_both_layouts(role, spread, dtype):
    """Gradients are rounded to the nearest there."""
    x = matrix(96, 64, spread, dtype)
    expected = quantizer(role).quantize(x)
    operand = NVFP4(emulate=True, stochastic=False).operand(x, role, dtype)
    for found, codes, scale, amax in (
        (operand.rows(), expected.data, expected.scale, expected.global_amax_row),
        (operand.columns(), expected.data_t, expected.scale_t, expected.global_amax_col),
    ):
        assert torch.equal(found.codes, codes)
        assert torch.equal(found.scale.float(), scale.float())
        assert torch.equal(found.amax, amax[0])


@pytest.mark.parametrize("product", ["forward", "grad_weight"])
def test_a_product_is_that_of_the_reference_up_to_the_order_of_a_float32_sum(product):
    of_sum = gemm.GEMMType.WGRAD if product == "grad_weight" else gemm.GEMMType.FPROP
    roles = ("gradient", "input") if product == "grad_weight" else ("input", "weight")
    matrices = [
        matrix(64, columns, 0.5, torch.bfloat16) for columns in ((32, 96) if product == "grad_weight" else (64, 64))
    ]
    theirs = [quantizer(role).quantize(m) for role, m in zip(roles, matrices, strict=True)]
    by = NVFP4(emulate=True, stochastic=False)
    ours = [by.operand(m, role, m.dtype) for role, m in zip(roles, matrices, strict=True)]
    if product == "forward":
        operands, (a, b) = [(t.data, t.scale) for t in theirs], (operand.rows() for operand in ours)
    else:
        operands, (a, b) = [(t.data_t, t.scale_t) for t in theirs], (operand.columns() for operand in ours)
    (codes_a, scale_a), (codes_b, scale_b) = operands
    expected = quantizer("input").qgemm(
        codes_a,
        codes_b,
        None,
        torch.float32,
        scale_a,
        scale_b,
        gemm_type=of_sum,
        qresult_x=theirs[0],
        qresult_w=theirs[1],
    )
    torch.testing.assert_close(
        by.multiply(a, b, torch.float32, product), expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item()
    )
