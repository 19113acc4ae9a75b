"""The loss from hidden states on a GPU: its kernels against all logits, and FP8 kernels against their emulation."""

import pytest
import torch
import torch.nn.functional as F

from lightning_lowprec.losses import linear_cross_entropy
from tests.gpu.device import DEVICE, NO_VALUES
from tests.quality import sqnr

REHEARSED = pytest.mark.rehearsed  # tests/ledger/test_head.py runs these kernels in bf16
TOKENS, K, V = 3000, 256, 5000  # several chunks of rows, the last one ragged


def step(loss_of, dtype, **options):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(TOKENS, K, generator=generator).to(DEVICE, dtype).requires_grad_()
    w = (torch.randn(V, K, generator=generator) * 0.1).to(DEVICE, dtype).requires_grad_()
    t = torch.randint(0, V, (TOKENS,), generator=generator).to(DEVICE)
    t[:9] = -100
    loss = loss_of(h, w, t, **options)
    loss.backward()
    return loss.detach(), h.grad, w.grad


def all_logits(h, w, t, label_smoothing=0.0):
    return F.cross_entropy(F.linear(h, w).float(), t, label_smoothing=label_smoothing)


@pytest.mark.parametrize(
    ("dtype", "label_smoothing"),
    [
        (torch.float16, 0.1),
        pytest.param(torch.float16, 0.0, marks=REHEARSED),
        pytest.param(torch.bfloat16, 0.1, marks=REHEARSED),
        pytest.param(torch.bfloat16, 0.0, marks=REHEARSED),
    ],
)
def test_kernels_compute_the_loss_of_all_logits(dtype, label_smoothing):
    expected, *gradients = step(all_logits, dtype, label_smoothing=label_smoothing)
    loss, *found = step(linear_cross_entropy, dtype, rows=1024, label_smoothing=label_smoothing)
    assert abs(loss - expected) <= 1e-5 * expected or NO_VALUES
    for made, wanted in zip(found, gradients, strict=True):
        assert sqnr(wanted, made) >= 40 or NO_VALUES


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=REHEARSED)])
def test_fp8_kernels_agree_with_their_emulation(dtype):
    loss, *found = step(linear_cross_entropy, dtype, fp8=True, rows=1024)
    expected, *gradients = step(linear_cross_entropy, dtype, fp8=True, rows=1024, emulate=True)
    assert abs(loss - expected) <= 1e-3 * expected or NO_VALUES
    for made, wanted in zip(found, gradients, strict=True):
        assert sqnr(wanted, made) >= 30 or NO_VALUES
