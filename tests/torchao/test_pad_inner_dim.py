"""`pad_inner_dim=True`: layers whose features are no multiples of 16 run in FP8, padded with zeros."""

import re

import lightning as L
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowprec import FP8TorchAO, plan
from tests.toys import Operations

ATEN = torch.ops.aten


def run(layer, plugin, x, gradient):
    wrapped = L.Fabric(accelerator="cpu", plugins=plugin).setup(nn.Sequential(layer))
    x = x.clone().requires_grad_()
    with Operations() as operations:
        output = wrapped(x)
        output.backward(gradient.to(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).is_contiguous(), "a model may call `view`"
    products = [args for func, args, _ in operations.seen if func in (ATEN.mm.default, ATEN._scaled_mm.default)]
    sizes = [size for args in products for size in (*args[0].shape, *args[1].shape)]
    return (output.detach(), x.grad, *(p.grad for p in layer.parameters())), sizes


def padded(layer, more_in, more_out):
    if isinstance(layer, Conv1D):
        wide = Conv1D(layer.nf + more_out, layer.nx + more_in)
        wide.weight.data = nn.functional.pad(layer.weight.data, (0, more_out, 0, more_in))
    else:
        wide = nn.Linear(layer.in_features + more_in, layer.out_features + more_out, bias=layer.bias is not None)
        wide.weight.data = nn.functional.pad(layer.weight.data, (0, more_in, 0, more_out))
    if layer.bias is not None:
        wide.bias.data = nn.functional.pad(layer.bias.data, (0, more_out))
    return wide


LAYERS = {  # 20 and 36 are padded to 32 and 48
    "Linear": lambda: nn.Linear(20, 36),
    "no bias": lambda: nn.Linear(20, 36, bias=False),
    "Conv1D": lambda: Conv1D(36, 20),
    "in": lambda: nn.Linear(20, 48),
    "out": lambda: nn.Linear(32, 36),
}
OPTIONS = {
    "tensorwise": {},
    "rowwise": {"recipe": "rowwise"},
    "gw-hp": {"recipe": "rowwise_with_gw_hp"},
    "forward in bf16": {"recipe": {"*": {"forward": "bf16"}}},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_values_are_those_of_a_padded_model(kind, options):
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    k, n = layer.weight.shape if kind == "Conv1D" else layer.weight.shape[::-1]
    x, gradient, more = torch.randn(5, 3, k), torch.linspace(-1, 1, 15 * n).view(5, 3, n), (-k % 16, -n % 16)
    wide = padded(layer, *more)
    found, sizes = run(layer, FP8TorchAO(pad_inner_dim=True, **OPTIONS[options]), x, gradient)
    behind = [nn.functional.pad(tensor, (0, size)) for tensor, size in zip((x, gradient), more, strict=True)]
    for ours, theirs in zip(found, run(wide, FP8TorchAO(**OPTIONS[options]), *behind)[0], strict=True):
        assert torch.equal(ours, theirs[tuple(map(slice, ours.shape))])
    if options != "forward in bf16":
        assert sizes
        rows = {15} if options == "gw-hp" else set()  # of the batch: a product in bf16 needs no others
        assert {size for size in sizes if size % 16} == rows


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "block", "mxfp8"])
def test_a_layer_that_is_pruned_to_50_rows_in_the_run_computes_as_one_with_zeros(recipe):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(16, 64)
    wide = padded(nn.Linear(64, 50), 0, 14)
    wrapped = L.Fabric(accelerator="cpu", plugins=FP8TorchAO(recipe)).setup(nn.Sequential(layer))
    wrapped(x)
    layer.weight, layer.bias = nn.Parameter(wide.weight[:50].detach()), nn.Parameter(wide.bias[:50].detach())
    layer.out_features = 50
    output = wrapped(x)
    output.float().sum().backward()
    expected = L.Fabric(accelerator="cpu", plugins=FP8TorchAO(recipe)).setup(nn.Sequential(wide))(x)
    expected[:, :50].float().sum().backward()
    assert torch.equal(output, expected[:, :50])
    assert torch.equal(layer.weight.grad, wide.weight.grad[:50])


@pytest.mark.parametrize("pad", [True, "beside", False])
def test_the_plan_says_what_it_costs_and_names_the_option(pad):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.even, self.small = nn.Linear(300, 300), nn.Linear(304, 304), nn.Linear(20, 16)

    plugin = FP8TorchAO({"even": "block", "*": "rowwise"} if pad == "beside" else "tensorwise", pad_inner_dim=bool(pad))
    L.Fabric(accelerator="cpu", plugins=plugin).setup(Net())
    cost = "padded to 304 -> 304, 2.7% more FLOPs"
    if pad:
        assert plugin.plan.converted == ("odd", "even", "small")
        assert re.search(f"FP8( .rowwise.)?, {cost}", str(plugin.plan))
        said = "converted 3 of 3 linear layers (2 of them padded with zeros: 2.9% more FLOPs in these)"
        assert plugin.plan.summary() == said + " (2 rowwise; 1 block)" * (pad == "beside")
    else:
        assert plugin.plan.converted == ("even",)
        assert f"kept: features are no multiples of 16, bf16 (`pad_inner_dim=True`: {cost})" in str(plugin.plan)
        assert cost in str(plan(Net()))
        assert "pad_inner_dim" not in str(plan(Net(), "fp8-hybrid-te"))


def test_what_the_option_does_not_change_does_not_name_it():
    heads = str(plan(nn.ModuleDict({"body": nn.Linear(64, 64), "head": nn.Linear(64, 10)})))
    assert "kept: features are no multiples of 16" in heads
    with pytest.raises(ValueError, match=r"(?s)no multiples of 32.* features are multiples of 32") as error:
        L.Fabric(accelerator="cpu", precision="mxfp8").setup(nn.Linear(48, 48))
    assert not any("pad_inner_dim" in said for said in (heads, str(error.value)))
    with pytest.raises(ValueError, match=r"`pad_inner_dim=True`: padded to 304 -> 304, 2.7% more FLOPs"):
        L.Fabric(accelerator="cpu", precision="fp8-hybrid").setup(nn.Linear(300, 300))
