"""Backward products of the rowwise recipes that are scaled by the kernel, against the exact products of their codes."""

import lightning as L
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.conversion.recipe_map import LayerRecipe
from lightning_lowprec.torchao import linear as fp8
from lightning_lowprec.torchao.fp8 import CPU_SCALES_TENSORWISE
from lightning_lowprec.torchao.settings import Settings
from tests.quality import expect_db, sqnr

KERNELS = pytest.mark.skipif(CPU_SCALES_TENSORWISE, reason="this torch has no rowwise FP8 kernel for CPU (2.13 has)")
TOKENS, IN, OUT = 96, 64, 48
RECIPES = ("rowwise", "rowwise_with_gw_hp")
BACKWARDS = ("scaled_after", "scaled_inside")


class Products:
    """Notes every product of codes: its exact value, with and without signs, fast accumulation, the kernel's scales."""

    def __init__(self):
        self.exact, self.fast, self.scales, self.codes = [], [], [], []

    def __enter__(self):
        self.kernel = torch._scaled_mm
        torch._scaled_mm = self.noted

    def __exit__(self, *_):
        torch._scaled_mm = self.kernel

    def noted(self, a, b, *, scale_a, scale_b, use_fast_accum, **options):
        self.codes.append((a.view(torch.uint8).clone(), b.t().contiguous().view(torch.uint8)))
        a_values, b_values = a.double() * scale_a, b.double() * scale_b
        self.exact.append((a_values @ b_values, a_values.abs() @ b_values.abs()))
        self.fast.append(use_fast_accum)
        self.scales.append((tuple(scale_a.shape), tuple(scale_b.shape)))
        return self.kernel(a, b, scale_a=scale_a, scale_b=scale_b, use_fast_accum=use_fast_accum, **options)


def layer(recipe, backward, emulate=False, power_of_two=None):
    torch.manual_seed(0)
    found = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    settings = Settings(
        fp8_format="e4m3",
        emulate=emulate,
        round_scales_to_power_of_2=power_of_two,
        rowwise_backward=backward,
    )
    fp8.convert(found, [""], lambda fqn: settings.of(LayerRecipe(recipe)), low_eval=True)
    return found


def gradients(linear, seen=None):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, IN, generator=generator) * torch.logspace(-3, 3, TOKENS).unsqueeze(1)
    grad = torch.randn(TOKENS, OUT, generator=generator) * torch.logspace(2, -4, OUT)
    x = x.bfloat16().requires_grad_()
    output = linear(x)
    with seen or Products():
        output.backward(grad.bfloat16())
    return x.grad, linear.weight.grad


@KERNELS
@pytest.mark.parametrize("power_of_two", [None, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_kernel_scales_the_same_codes_and_the_product_is_rounded_once(recipe, power_of_two):
    products = {backward: Products() for backward in BACKWARDS}
    layers = {backward: layer(recipe, backward, power_of_two=power_of_two) for backward in BACKWARDS}
    found = {backward: gradients(layers[backward], products[backward]) for backward in BACKWARDS}
    inside, after = products["scaled_inside"], products["scaled_after"]
    count = 2 if recipe == "rowwise" else 1
    shapes = [((TOKENS, 1), (1, IN)), ((OUT, 1), (1, IN))][:count]
    assert (inside.scales, after.scales) == (shapes, [((), ())] * count)
    assert inside.fast == after.fast == [False] * count
    for ours, theirs in zip(inside.codes, after.codes, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for exact, ours, theirs in zip(inside.exact, found["scaled_inside"], found["scaled_after"], strict=False):
        product, magnitude = exact
        bound = 2**-8 * product.abs() + TOKENS * 2**-24 * magnitude  # bf16 has 8 bits; the sum is float32
        assert ((ours.double() - product).abs() <= bound).all()
        if power_of_two is None:  # multiplying by a power of two rounds nothing
            assert torch.equal(ours, theirs)
        else:
            assert not ((theirs.double() - product).abs() <= bound).all(), "rounded twice"
            assert sqnr(product, ours) > sqnr(product, theirs) + 1
        expect_db(sqnr(product, theirs), 45)
        expect_db(sqnr(product, ours), 50)
    if recipe == "rowwise_with_gw_hp":
        assert torch.equal(found["scaled_inside"][1], found["scaled_after"][1]), "in high precision"


@pytest.mark.parametrize("recipe", RECIPES)
def test_emulated_products_are_the_same(recipe):
    after, inside = (gradients(layer(recipe, backward, emulate=True)) for backward in BACKWARDS)
    assert all(torch.equal(a, b) for a, b in zip(after, inside, strict=True))


@KERNELS
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_it_is_one_graph_with_the_same_gradients(recipe):
    torch._dynamo.reset()
    counters.clear()
    eager = gradients(layer(recipe, "scaled_inside"))
    compiled = layer(recipe, "scaled_inside")
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(eager, gradients(compiled), strict=True))
    assert counters["stats"]["unique_graphs"] == 1


@KERNELS
def test_the_plugin_passes_it_on_in_any_batch_and_with_float32_weights():
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, 5))
    plugin = FP8TorchAO("rowwise", rowwise_backward="scaled_inside", emulate=False)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = Products()
    loss = wrapped(torch.randn(7, IN)).float().square().mean()
    with seen:
        fabric.backward(loss)
    assert seen.scales == [((16, 1), (1, IN)), ((OUT, 1), (1, IN))][-len(seen.scales) :]
    assert seen.fast
    assert not any(seen.fast)
    assert model[0].weight.grad.dtype is torch.float32
    optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rowwise_backward": "scaled_inside"}, "is not valid with `recipe='tensorwise'`, .* one scale per operand"),
        ({"recipe": "rowwise", "rowwise_backward": "exact"}, "expected one of: scaled_after, scaled_inside"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=f"`rowwise_backward='{options['rowwise_backward']}'` {message}|{message}"):
        FP8TorchAO(**options)


def test_a_sharded_model_is_not_used_under_the_other_backward():
    one, other = (FP8TorchAO("rowwise", rowwise_backward=backward) for backward in BACKWARDS)
    assert one.sharded_identity() != other.sharded_identity()
