"""The kernel that encodes weights writes the codes of torch's own casts, in both layouts, bit for bit."""

import lightning as L
import pytest
import torch
from torchao.float8.float8_utils import amax_to_scale

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.masters.optimizer import add_masters
from lightning_lowprec.numerics import encode
from lightning_lowprec.numerics.largest import asked, largest
from lightning_lowprec.torchao import weight_codes
from tests.torchao.test_weight_codes import run, same

ENCODE = "lightning_lowprec.numerics.encode_kernel"


def codes_of(weight, scale):
    codes = encode.Encoded(weight)
    codes.scale.fill_(scale)
    return codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_value(dtype):
    """Normal and subnormal codes, ties, zeros of both signs, infinities, NaN and values beyond the largest."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for rows, columns, scale in ((160, 272, 111.3), (16, 16, 1.0), (128, 256, 448.0)):
        weight = torch.randn(rows, columns, generator=generator)
        weight *= torch.exp2(torch.randint(-18, 9, weight.shape, generator=generator).float())
        odd = [
            0.0,
            -0.0,
            float("inf"),
            -float("inf"),
            float("nan"),
            448.0,
            464.0,
            1e4,
            2.0**-9,
            2.0**-10,
            1.0625,
            1.1875,
        ]
        weight.view(-1)[: len(odd)] = torch.tensor(odd)
        made.append((weight.to(dtype), codes_of(weight.to(dtype), scale)))
    weights = [weight for weight, _ in made]
    encode.launch(weights, encode._addresses(weights, [codes for _, codes in made]), None, None, "plain")
    for weight, codes in made:
        expected = (weight.float() * codes.scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        for layout, wanted in ((codes.rows, expected), (codes.columns, expected.t().contiguous())):
            numbers = layout.float()
            assert torch.equal(numbers.isnan(), wanted.float().isnan())
            assert torch.equal(layout.view(torch.uint8)[~numbers.isnan()], wanted.view(torch.uint8)[~numbers.isnan()])


@pytest.fixture
def modes(monkeypatch):
    """The mode and the number of weights of every launch of the kernel, on CPU tensors."""
    seen, launch = [], encode.launch
    monkeypatch.setattr(encode, "DEVICES", {"cpu"})

    def noted(weights, table, hints, found, mode):
        seen.append((mode, len(weights)))
        launch(weights, table, hints, found, mode)

    monkeypatch.setattr(encode, "launch", noted)
    keep = weight_codes.ModelCodes.__init__
    monkeypatch.setattr(weight_codes.ModelCodes, "__init__", lambda *args, **kw: keep(*args, **{**kw, "kernel": True}))
    return seen


def test_training_by_the_kernel_is_training_without(modes):
    ours = run("per_step")
    assert modes == [("plain", 4)] * 3
    assert same(ours, run("per_gemm"))


def test_the_largest_values_come_from_the_optimizers_kernel(modes):
    """The first step of an optimizer is torch's own, which notes nothing; every later one is the kernel's."""
    ours = run("per_step", steps=5, master_weights="remainder")
    assert modes == [("plain", 4), ("plain", 4), *[("check", 4), ("mend", 4)] * 3]
    assert same(ours, run("per_gemm", steps=5, master_weights="remainder"))


def test_a_write_that_nobody_sees_makes_no_wrong_codes(modes):
    """The note of the optimizer's kernel is wrong after a write through `.data`, larger or smaller, and NaN."""
    weight = torch.nn.Parameter(torch.randn(48, 144, generator=torch.Generator().manual_seed(0)).bfloat16())
    same_weight = torch.nn.Parameter(torch.ones(16, 16).bfloat16())
    optimizer = add_masters(torch.optim.SGD([weight, same_weight], lr=0.5), "remainder")
    assert largest([weight, same_weight]) is None
    for change in (lambda t: t.mul_(4), lambda t: t.mul_(0.3), lambda t: t.zero_(), lambda t: t[3, 5].fill_(torch.nan)):
        weight.grad, same_weight.grad = torch.ones_like(weight), torch.ones_like(same_weight)
        optimizer.step()
        assert asked(weight).value == weight.detach().abs().max()
        change(weight.data)
        codes = [codes_of(w.detach(), 1.0) for w in (weight, same_weight)]
        hints = largest([weight, same_weight])
        weights = [w.detach() for w in (weight, same_weight)]
        encode.encode(weights, codes, lambda amax: amax_to_scale(amax, torch.float8_e4m3fn), hints, kernel=True)
        assert modes[-2:] == [("check", 2), ("mend", 2)]
        for w, c in zip((weight, same_weight), codes, strict=True):
            expected = amax_to_scale(w.detach().abs().max(), torch.float8_e4m3fn)
            torch.testing.assert_close(c.scale, expected, rtol=0, atol=0, equal_nan=True)
            wanted = (w.detach().float() * expected).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(c.rows.view(torch.uint8) & 0x7F, wanted.view(torch.uint8) & 0x7F)
            assert torch.equal(c.columns.view(torch.uint8), c.rows.t().contiguous().view(torch.uint8))


def test_saved_codes_that_the_kernel_overwrites_are_autograds_error(monkeypatch):
    monkeypatch.setattr(encode, "DEVICES", {"cpu"})
    plugin = FP8TorchAO()
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    net = torch.nn.Linear(64, 64)
    model = fabric.setup_module(net)
    net.weight_codes.model._kernel = True
    loss = model(torch.ones(16, 64, requires_grad=True)).sum()
    with torch.no_grad():
        net.weight.mul_(2)
    model(torch.ones(16, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fabric.backward(loss)
