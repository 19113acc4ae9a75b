"""Recipes whose quantizers are the user's own: what they may ask for, and what becomes of the layers."""

import copy
import pickle

import pytest
import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.custom_recipes.quantizer_factories import delayed_scaling_factory
from transformer_engine.pytorch.custom_recipes.reference_current_scaling import current_scaling_ref_factory

from lightning_lowprec import FP8TE, FP8TorchAO
from lightning_lowprec.te.layer import te_linears
from lightning_lowprec.te.recipes import CUSTOM, alignment_of, kind_of
from tests.te.reference import current_scaling
from tests.te.subjects import Net, fabric_for


def plugin_for(recipe=None, **options):
    return FP8TE(recipe or current_scaling(), norms=False, **options)


def test_what_it_is_called(reference_te):
    assert kind_of(current_scaling()) == CUSTOM
    assert plugin_for().precision == "fp8-te-custom"
    assert plugin_for(base="fp16").precision == "fp8-te-custom-fp16"


@pytest.mark.parametrize(("given", "expected"), [(None, 32), (128, 32), (16, 16), (24, 48)])
def test_alignment(reference_te, given, expected):
    """Of tokens and features; a number of the user's own counts, in multiples of Transformer Engine's 16."""
    fields = {} if given is None else {"quantization_alignment": given}
    recipe = CustomRecipe(qfactory=current_scaling_ref_factory, **fields)
    assert alignment_of(recipe) == expected
    model = nn.Sequential(*(nn.Linear(n, n) for n in (16, 32, 48)))
    plugin = plugin_for(recipe)
    fabric_for(plugin).setup(model)
    assert [layer.in_features for layer in te_linears(model)] == [n for n in (16, 32, 48) if n % expected == 0]
    assert {layer.token_alignment for layer in te_linears(model)} == {expected}
    with pytest.raises(ValueError, match=f"multiples of {expected}"):
        fabric_for(plugin_for(recipe)).setup(nn.Linear(8, 8))


def test_the_function_is_told_the_layer(reference_te):
    """So that it can choose by it: here the first layer of every block takes its inputs in e5m2."""
    asked = []

    def factory(role):
        asked.append(role)
        made = current_scaling_ref_factory(role)
        if role is not None and role.tensor_type == "input" and role.name.endswith(".1"):
            made.dtype = torch.float8_e5m2
        return made

    model = Net()
    fabric = fabric_for(plugin_for(CustomRecipe(qfactory=factory, quantization_alignment=16)))
    wrapped = fabric.setup(model)
    named = {role.name for role in asked if role is not None}
    assert named == {f"blocks.{block}.{layer}" for block in range(3) for layer in (1, 3)}
    wrapped(torch.randn(16, 32))
    found = [layer.quantizers["scaling_fwd"][0].dtype for layer in te_linears(model)]
    assert found == [torch.float8_e5m2, torch.float8_e4m3fn] * 3


def test_delayed_scaling_is_refused(reference_te):
    recipe = CustomRecipe(qfactory=delayed_scaling_factory)
    with pytest.raises(ValueError, match=r"DelayedScalingRequest for 'blocks\.0\.1'.*FP8TE\('delayed'\)"):
        fabric_for(plugin_for(recipe)).setup(Net())

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = te.LayerNormMLP(32, 64, device="cpu")

    def only_of_the_second_gemm(role):
        wanted = role is not None and role.tensor_type == "weight" and "fc2" in role.name
        return (delayed_scaling_factory if wanted else current_scaling_ref_factory)(role)

    with pytest.raises(ValueError, match="DelayedScalingRequest for 'mlp'"):
        fabric_for(plugin_for(CustomRecipe(qfactory=only_of_the_second_gemm))).setup(Own())


def test_biases(reference_te):
    """Their gradient is the sum of the output's, unquantised; Transformer Engine alone cannot compute it here."""
    torch.manual_seed(0)
    layer, x, grad = nn.Linear(32, 16), torch.randn(2, 16, 32), torch.randn(2, 16, 16).bfloat16()
    fabric = fabric_for(plugin_for())
    fabric.setup(layer)
    with fabric.autocast():
        layer(x).backward(grad)
    expected = grad.float().sum((0, 1))
    torch.testing.assert_close(layer.bias.grad, expected, rtol=2**-7, atol=2**-7)  # summed in bf16
    layer.gemm_bias_unfused_add = False
    with pytest.raises((TypeError, RuntimeError)), fabric.autocast():  # should this pass, the unfused addition can go
        layer(x).backward(grad)


def test_another_recipe_adds_biases_its_own_way_again(reference_te):
    model = Net()
    for plugin, unfused in ((plugin_for(), True), (FP8TE("current"), False), (plugin_for(), True)):
        fabric_for(plugin).setup(model)
        assert [layer.gemm_bias_unfused_add for layer in te_linears(model)] == [unfused] * 6
    fabric_for(FP8TorchAO()).setup(model)
    assert not any("gemm_bias_unfused_add" in module.__dict__ for module in model.modules())
    plain = nn.Linear(32, 32, bias=False)
    fabric_for(plugin_for()).setup(plain)
    assert not plain.gemm_bias_unfused_add


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_trained_layer_is_copied(reference_te, way):
    """By a function that does not pickle; the copy computes the same."""
    torch.manual_seed(0)
    local = CustomRecipe(qfactory=lambda role: current_scaling_ref_factory(role), quantization_alignment=16)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(8, 32)
    fabric = fabric_for(plugin_for(local))
    wrapped = fabric.setup(model)
    for _ in range(2):
        wrapped(x).sum().backward()
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    with fabric.autocast():
        expected, found = model(x), twin(x)
    assert torch.equal(found, expected)
    model.zero_grad(), twin.zero_grad()
    expected.sum().backward(), found.sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
