"""A new format (docs/architecture.md) multiplies and is exported like our own."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from lightning_lowprec.conversion import backends
from lightning_lowprec.products.arithmetic import Arithmetic, Operand
from lightning_lowprec.products.formats import FORMATS, FormatSpec
from lightning_lowprec.torchao.linear import coded_layers
from lightning_lowprec.torchao.plugin import SharedOptions, TorchAO
from tests.fsdp2.toy import Toy
from tests.quality import expect_db, sqnr
from tests.toys import convert


@dataclass(frozen=True)
class Int5(Arithmetic):
    """Integers from -15 to 15, summed in float32."""

    tokens: ClassVar[int] = 16

    def operand(self, matrix, role, dtype):
        matrix = matrix.to(dtype)
        return Operand(lambda: codes_of(matrix), lambda: codes_of(matrix.t()))

    def multiply(self, a, b, dtype, product):
        (codes_a, step_a), (codes_b, step_b) = a, b
        with torch.autocast(codes_a.device.type, enabled=False):
            return ((codes_a @ codes_b.t()) * step_a * step_b.t()).to(dtype)


def codes_of(rows):
    step = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 15
    return (rows / step).round(), step


class Int5Mixed(TorchAO):
    """Linear layers in integers of five bits, everything else in bf16."""

    def __init__(self, recipe="int5", **options):
        super().__init__(recipe, ("int5",), SharedOptions(**options))

    def how(self, device):
        return f"int5 products by torch on {device}"


@pytest.fixture(autouse=True)
def int5():
    """Register the format, and a backend whose name has it."""
    FORMATS["int5"] = FormatSpec(
        precision="int5-mixed", title="int5", emulates=False, cpu="always", arithmetic=lambda emulate: Int5()
    )
    names = {"int5-mixed": backends.PrecisionName(plugin_class=Int5Mixed, summary="integers of five bits")}
    backends.register(backends.Backend(name="int5", title="int5", layers_from=(), names=names))
    yield
    backends.unregister("int5")
    del FORMATS["int5"]


def test_each_product_is_that_of_the_codes():
    layer = nn.Linear(32, 48)
    exact = nn.Linear(32, 48)
    exact.load_state_dict(layer.state_dict())
    model = convert(Int5Mixed(), nn.Sequential(layer))
    x = torch.randn(21, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for module in (model, exact):
        given = x.clone().requires_grad_()
        output = module(given)
        output.square().sum().backward()
        found.append((output.detach(), given.grad))
    (codes, step), (w_codes, w_step) = codes_of(x), codes_of(layer.weight.detach())
    assert codes.abs().max() == 15
    assert set(codes.flatten().tolist()) <= set(range(-15, 16))
    by_hand = (codes * step) @ (w_codes * w_step).t() + layer.bias.detach()
    torch.testing.assert_close(found[0][0], by_hand)
    for left, right in zip(*found, strict=True):
        expect_db(sqnr(right, left), 20)
    expect_db(sqnr(exact.weight.grad, layer.weight.grad), 20)


def test_it_is_exported_without_a_scale_of_its_own():
    """Its codes are no server's, so the format's own scales are what the weights get."""
    assert [backends.weight_roundings(layer) for layer in coded_layers(convert(Int5Mixed(), Toy()))] == 4 * [
        {"weight": None}
    ]
