"""The kernel that encodes a weight writes the codes of torch's own casts, in both layouts, bit for bit."""

import pytest
import torch
from torchao.float8.float8_utils import amax_to_scale

from lightning_lowprec.masters.optimizer import add_masters
from lightning_lowprec.numerics import fp8_matrices as encode
from lightning_lowprec.numerics.fp8_matrices import TwoLayouts, asked, largest


def same_codes(weight, rows, columns, scale):
    expected = (weight.detach().float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    for layout, wanted in ((rows, expected), (columns, expected.t().contiguous())):
        numbers = layout.float()
        assert torch.equal(numbers.isnan(), wanted.float().isnan())
        assert torch.equal(layout.view(torch.uint8)[~numbers.isnan()], wanted.view(torch.uint8)[~numbers.isnan()])


@pytest.fixture
def modes(monkeypatch):
    """The mode of every launch of the kernel, on CPU tensors."""
    seen, launch = [], encode.launch
    monkeypatch.setattr(encode, "DEVICES", {"cpu"})
    monkeypatch.setattr(encode, "launch", lambda *args: (seen.append(args[-1]), launch(*args))[1])
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "scale"), [(160, 272, 111.3), (16, 16, 1.0), (128, 256, 448.0)])
def test_every_kind_of_value(dtype, rows, columns, scale, modes):
    """Normal and subnormal codes, ties, zeros of both signs, infinities, NaN and values beyond the largest."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.exp2(torch.randint(-18, 9, weight.shape, generator=generator).float())
    inf, nan = float("inf"), float("nan")
    odd = [0.0, -0.0, inf, -inf, nan, 448.0, 464.0, 1e4, 2.0**-9, 2.0**-10, 1.0625, 1.1875]
    weight.view(-1)[: len(odd)] = torch.tensor(odd)
    weight = weight.to(dtype)
    assert encode.kernel_encodes(weight)
    *codes, used = encode.weight_codes(weight, lambda amax: torch.tensor(scale), None)
    same_codes(weight, *codes, used)
    assert modes == ["plain"]


def test_a_write_that_nobody_sees_makes_no_wrong_codes(modes):
    """The note of the optimizer's kernel is wrong after a write through `.data`, larger or smaller, and NaN."""
    weight = torch.nn.Parameter(torch.randn(48, 144, generator=torch.Generator().manual_seed(0)).bfloat16())
    optimizer = add_masters(torch.optim.SGD([weight], lr=0.5), "remainder")
    assert largest(weight) is None
    changes = (
        lambda t: t,
        lambda t: t.mul_(4),
        lambda t: t.mul_(0.3),
        torch.Tensor.zero_,
        lambda t: t[3, 5].fill_(torch.nan),
    )
    for change in changes:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert asked(weight).value == weight.detach().abs().max()
        change(weight.data)
        hint = largest(weight)
        *codes, scale = encode.weight_codes(weight.detach(), lambda a: amax_to_scale(a, torch.float8_e4m3fn), hint)
        assert modes[-2:] == ["check", "mend"]
        expected = amax_to_scale(weight.detach().abs().max(), torch.float8_e4m3fn)
        torch.testing.assert_close(scale, expected, rtol=0, atol=0, equal_nan=True)
        same_codes(weight, *codes, scale)


def test_the_head_takes_the_note_of_the_optimizers_kernel(modes):
    """The first step of an optimizer is torch's own, which notes nothing; every later one is the kernel's."""
    weight = torch.nn.Parameter(torch.randn(48, 144, generator=torch.Generator().manual_seed(0)).bfloat16())
    optimizer = add_masters(torch.optim.AdamW([weight], lr=1e-2), "remainder")
    for _ in range(3):
        ours, expected = TwoLayouts.of(weight), TwoLayouts.of(weight.detach())  # no Parameter: torch's own operations
        assert torch.equal(ours.rows.view(torch.uint8), expected.rows.view(torch.uint8))
        assert torch.equal(ours.columns.view(torch.uint8), expected.columns.view(torch.uint8))
        assert torch.equal(ours.inv_scale, expected.inv_scale)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert modes == ["plain", "plain", "check", "mend"]
