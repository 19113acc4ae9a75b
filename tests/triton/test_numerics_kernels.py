"""The kernels of numerics against torch's own operations: codes of weights and of groups of rows, and a product."""

from dataclasses import replace

import pytest
import torch
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_utils import amax_to_scale

from lightning_lowprec.masters.optimizer import add_masters
from lightning_lowprec.numerics import fp8_matrices as encode
from lightning_lowprec.numerics import grouped_fp8, linear_cross_entropy
from lightning_lowprec.numerics.formats import largest_scale, visible_scale
from lightning_lowprec.numerics.fp8_matrices import TwoLayouts, asked, largest
from lightning_lowprec.numerics.grouped_fp8 import encode_columns
from lightning_lowprec.products.linear import linear
from lightning_lowprec.torchao.settings import products_of


def same_codes(weight, rows, columns, scale):
    expected = (weight.detach().float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    for layout, wanted in ((rows, expected), (columns, expected.t().contiguous())):
        numbers = layout.float()
        assert torch.equal(numbers.isnan(), wanted.float().isnan())
        assert torch.equal(layout.view(torch.uint8)[~numbers.isnan()], wanted.view(torch.uint8)[~numbers.isnan()])


def encode_by(weight, codes, amax, mode):
    """Encode by a largest value that is not the weight's: by "mend" because the hint is another one."""
    from lightning_lowprec.numerics import kernels

    given = weight, *codes, torch.empty(1), torch.empty(1)
    grid = kernels.encode_weight[-(-weight.shape[1] // 128), -(-weight.shape[0] // 128)]
    grid(*given, amax + 1, amax.view(torch.int32), *weight.shape, MODE=mode, VISIBLE=False)


@pytest.fixture
def modes(monkeypatch):
    """Whether each weight was encoded by a hint; on CPU tensors."""
    seen, launch = [], encode.launch
    monkeypatch.setattr(encode, "DEVICES", {"cpu"})
    monkeypatch.setattr(encode, "launch", lambda *args: (seen.append(args[1] is not None), launch(*args))[1])
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "scale"), [(160, 272, 111.3), (16, 16, 1.0), (128, 256, 448.0)])
def test_every_kind_of_value(dtype, rows, columns, scale, modes):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.exp2(torch.randint(-18, 9, weight.shape, generator=generator).float())
    inf, nan = float("inf"), float("nan")
    odd = [0.0, -0.0, inf, -inf, nan, 448.0, 464.0, 1e4, 2.0**-9, 2.0**-10, 1.0625, 1.1875]
    weight.view(-1)[: len(odd)] = torch.tensor(odd)
    weight = weight.to(dtype)
    assert encode.kernel_encodes(weight)
    unfit = weight.t(), weight[:, 1:], weight[1:], weight.double(), weight.view(-1)[1:-15].view(-1, 16)
    assert not any(map(encode.kernel_encodes, unfit))
    *codes, _, _ = encode.weight_codes(weight, None, visible=False)
    same_codes(weight, *codes, torch.tensor(float("nan")))
    amax = torch.tensor(448 / scale)
    for mode in ("encode", "mend"):
        encode_by(weight, codes, amax, mode)
        same_codes(weight, *codes, largest_scale(amax, torch.float8_e4m3fn, False))


def test_a_write_that_nobody_sees_makes_no_wrong_codes(modes):
    """The note of the optimizer's kernel is wrong after a write through `.data`, larger or smaller, and NaN."""
    weight = torch.nn.Parameter(torch.randn(48, 144, generator=torch.Generator().manual_seed(0)).bfloat16())
    optimizer = add_masters(torch.optim.SGD([weight], lr=0.5), "remainder")
    assert largest(weight) is None
    changes = (
        lambda t: t,
        lambda t: t.mul_(4),
        lambda t: t.mul_(0.3),
        lambda t: t[47, 143].fill_(-9.0),
        lambda t: t[3, 5].fill_(torch.nan),
        torch.Tensor.zero_,
    )
    for change in changes:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        largest_now = weight.detach().abs().max().float()
        torch.testing.assert_close(asked(weight).value, largest_now, rtol=0, atol=0, equal_nan=True)
        change(weight.data)
        hint = largest(weight)
        *codes, scale, _ = encode.weight_codes(weight.detach(), hint, visible=False)
        assert modes[-1]
        expected = amax_to_scale(weight.detach().abs().max(), torch.float8_e4m3fn)
        torch.testing.assert_close(scale, expected, rtol=0, atol=0, equal_nan=True)
        same_codes(weight, *codes, scale)


def test_the_head_takes_the_note_of_the_optimizers_kernel(modes):
    """Torch makes the first step and notes nothing. A head that is first read after other steps gets a note too."""
    generator = torch.Generator().manual_seed(0)
    heads = [torch.nn.Parameter(torch.randn(48, 144, generator=generator).bfloat16()) for _ in range(2)]
    optimizer = add_masters(torch.optim.AdamW(heads, lr=1e-2), "remainder")
    for read in (1, 1, 2, 2):
        for weight in heads[:read]:
            found, scale = TwoLayouts.of(weight), visible_scale(weight.detach().abs().max())
            same_codes(weight, found.rows, found.columns, scale)
            assert found.inv_scale == 1 / scale
        for weight in heads:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert modes == [False, False, True, False, True, True]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns of 0 * inf
@pytest.mark.parametrize("visible", [False, True])
def test_scales_of_every_kind_of_largest_value(visible, modes):
    powers = [2.0**exponent for exponent in (-149, -130, -118, -41, -40, 0, 8, 9, 100, 127)]
    near = [x * y for x in powers for y in (1.0, 1.5, 1.75, 1.75 + 2**-22, 1.9)]
    for amax in [0.0, 1e-12, 9.9e-13, float("inf"), float("nan"), *near]:
        weight = torch.zeros(16, 16)
        weight[3, 4] = -amax
        *codes, scale, inverse = encode.weight_codes(weight, None, visible=visible)
        value = weight.abs().max()
        expected = visible_scale(value) if visible else largest_scale(value, torch.float8_e4m3fn, False)
        torch.testing.assert_close((scale, inverse), (expected, 1 / expected), rtol=0, atol=0, equal_nan=True)
        same_codes(weight, *codes, scale)


@pytest.mark.parametrize(("in_by_out", "power_of_2"), [(False, False), (True, False), (False, True)])
def test_a_layer_reads_the_layouts_that_the_kernel_wrote(in_by_out, power_of_2, modes, monkeypatch):
    """Outputs and gradients are those of codes that torch writes, with a note of the optimizer that is right or not."""
    for module in ("numerics.fp8_matrices", "products.linear"):
        monkeypatch.setattr(f"lightning_lowprec.{module}.LARGE", 48 * 144)  # the smallest weight that is large
    config = Float8LinearConfig(round_scales_to_power_of_2=power_of_2)
    products = replace(products_of(config, True), in_by_out=in_by_out, saves_weight=True)
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(48, 144, generator=generator).bfloat16())
    assert encode.hint_of(weight) is None
    for step in range(3):
        x = torch.randn(32, *weight.shape[:: -1 if in_by_out else 1][1:], generator=generator).bfloat16()
        found = []
        for devices in ({"cpu"}, set()):
            monkeypatch.setattr(encode, "DEVICES", devices)
            rows = x.clone().requires_grad_()
            weight.grad = None
            output = linear(rows, weight, None, None, products, encode.hint_of(weight))
            output.float().square().sum().backward()
            found.append((output, rows.grad, weight.grad))
        assert all(torch.equal(ours, expected) for ours, expected in zip(*found, strict=True))
        if step == 0:
            encode.ask(weight)
            optimizer = add_masters(torch.optim.AdamW([weight], lr=1e-2), "remainder")
        optimizer.step()
    assert modes == ([] if power_of_2 else [False, True, True]), "the kernel has no such scales"
    assert bool(encode.hint_of(weight) == weight.abs().max()), "noted by the kernel in every step but the first"


def by_hand(rows, ends, power_of_2):
    """torchao's formula, group by group, in float64."""
    codes = torch.zeros(rows.shape[1], rows.shape[0])
    inverse = torch.empty(len(ends), rows.shape[1])
    start = 0
    for number, end in enumerate(ends):
        part = rows[start:end].double()
        scale = 448 / part.abs().amax(0).clamp(min=1e-12)
        scale = (2.0 ** torch.floor(torch.log2(scale)) if power_of_2 else scale).float()
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
def test_codes_and_scales_of_each_group_and_a_nan_reaches_its_group_and_column_alone(dtype, power_of_2, way):
    rows = torch.randn(192, 80, generator=torch.Generator().manual_seed(0)) * 3
    rows[20:32] = 0  # zero rows, and a group of nothing else
    rows[96:112] = 0
    rows[120, 3] = torch.nan
    rows, ends = rows.to(dtype), [32, 96, 112, 176]
    codes, inverse = encode_columns(rows, torch.tensor(ends, dtype=torch.int32), power_of_2)
    expected, scales = by_hand(rows, ends, power_of_2)
    assert codes.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(codes[:, :176].float(), expected[:, :176], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(inverse, scales, rtol=0 if power_of_2 else 1e-6, atol=0, equal_nan=True)
    assert (scales.isnan().sum(), expected.isnan().sum()) == (1, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 0.3, 1.5, 0.0, float("nan")])
def test_products_are_rounded_once_and_a_factor_of_one_writes_nothing(dtype, factor, monkeypatch):
    """Half of all bf16 numbers times 1.5 are ties. A NaN with other bits than the usual ones stays as it is."""
    monkeypatch.setattr(linear_cross_entropy, "DEVICES", {"cpu"})
    values = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = values.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[0, 0] = 0x7FC12345 >> (32 - 8 * dtype.itemsize)
    before, expected = bits.clone(), (values.float() * torch.tensor(factor)).to(dtype)
    version = values._version
    assert linear_cross_entropy.multiply_(values, torch.tensor(factor)) is values
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert values._version > version, "autograd notices a write to what it saved"
    assert factor != 1 or torch.equal(bits, before)
