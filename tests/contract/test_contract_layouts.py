"""A layer takes inputs and gradients in every dense layout, and its results are those of contiguous ones.

Emulated products ask of their operands what kernels ask: ``numerics/kernel_operands.py``. The same layouts run on the
null GPU, where torch itself checks: ``tests/ledger/test_products.py``.
"""

import math

import pytest
import torch

from lightning_lowprec.numerics import kernel_operands
from lightning_lowprec.numerics.kernel_operands import check_grouped, check_operands
from tests.contract.layouts import LAYERS, NAMES, PLUGINS, SHAPES, results


@pytest.mark.parametrize("how", [*NAMES, *PLUGINS])
@pytest.mark.parametrize("kind", LAYERS)
def test_every_layout(how, kind):
    found = iter(results(how, kind))
    for shape in SHAPES:
        first, *others = (next(found) for _ in range(2 * math.factorial(len(shape))))
        for other in others:
            for expected, got in zip(first, other, strict=True):  # torch's bf16 products sum in the order of a layout
                torch.testing.assert_close(got, expected, rtol=0, atol=0.05 if "bf16" in how or "gw-hp" in how else 0)
    assert next(found, None) is None


A = torch.zeros(32, 64, dtype=torch.float8_e4m3fn)
B = torch.zeros(16, 64, dtype=torch.float8_e4m3fn).t()


REFUSED = {
    "columns, rows": (A.t().contiguous().t(), B),
    "rows, rows": (A, B.contiguous()),
    "K": (A[:, :8].contiguous(), B[:8].t().contiguous().t()),
    "N": (A, B[:, :8]),
    "two of e5m2": (A.to(torch.float8_e5m2), B.to(torch.float8_e5m2)),
    "float32": (torch.zeros(A.shape), B),
}


@pytest.mark.parametrize("operands", REFUSED.values(), ids=REFUSED)
def test_operands_that_kernels_refuse(operands):
    with pytest.raises(RuntimeError, match=r"\[M, K\] in rows by \[K, N\] in columns, K and N multiples of 16,"):
        check_operands(*operands)


def test_operands_that_kernels_take():
    check_operands(A, B)
    check_operands(A.to(torch.float8_e5m2), B)
    check_operands(A[:1], B)
    check_operands(torch.zeros(32, 96, dtype=A.dtype)[:, :64], B)  # rows of a larger matrix


def test_grouped_operands():
    stack = torch.zeros(2, 16, 64, dtype=A.dtype).mT
    check_grouped(A, stack)
    for wrong in ((A.t().contiguous().t(), stack), (A, stack.contiguous()), (A.to(torch.float8_e5m2), stack)):
        with pytest.raises(RuntimeError, match="groups of contiguous e4m3 by e4m3 in columns, in multiples of 16"):
            check_grouped(*wrong)


def test_layouts_reach_the_check(monkeypatch):
    """The emulated products of every backend with kernels of torch's ask."""
    monkeypatch.setattr(kernel_operands, "_FLOAT8", ())
    for how in ("fp8-hybrid", "msamp-o2"):
        with pytest.raises(RuntimeError, match="FP8 kernels multiply"):
            results(how, "Linear")
