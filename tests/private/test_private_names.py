"""Names of libraries are found, or listed as lost; torchao and transformers have all that we use."""

from typing import get_args

import pytest
import torch
from torch import nn

from lightning_lowprec.extras import missing
from lightning_lowprec.names import OF_LIGHTNING
from lightning_lowprec.private import torchao as of_torchao
from lightning_lowprec.private import transformers as of_transformers
from lightning_lowprec.private.either import MAIN

LINEAR = "torch.nn.modules.linear.Linear"


@pytest.mark.parametrize(
    "gone",
    ["torch.no_such_module.f", "torch.nn.NoSuchClass", f"{LINEAR}.in_features", f"{LINEAR}().no_such_attribute"],
)
def test_names_that_are_gone(gone):
    there = ["torch.nn", "torch.nn.Module._compiled_call_impl", f"{LINEAR}.forward", f"{LINEAR}().in_features"]
    assert missing([gone, *there]) == [gone]


def test_a_lost_name_of_torchao(monkeypatch):
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    assert of_torchao.moved() == []
    monkeypatch.delattr(Float8TrainingTensor, "_scale")
    assert of_torchao.moved() == [f"{Float8TrainingTensor.__module__}.Float8TrainingTensor._scale"]


def test_the_layers_of_transformers_that_are_taken_for_linears_compute_what_a_linear_does():
    falcon = pytest.importorskip("transformers.models.falcon.modeling_falcon").FalconLinear(5, 7)
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(7, 5)
    assert of_transformers.is_falcon_linear(type(falcon))
    assert of_transformers.is_conv1d(type(conv))
    for layer, transposed in ((falcon, False), (conv, True)):
        layer = layer.double()
        nn.init.normal_(layer.bias)
        x = torch.randn(2, 3, 5, dtype=torch.double)
        expected = nn.functional.linear(x, layer.weight.t() if transposed else layer.weight, layer.bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_a_lost_name_of_transformers(monkeypatch):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    assert of_transformers.moved() == []
    monkeypatch.delattr(mixtral.MixtralExperts, "_apply_gate")
    assert of_transformers.moved() == [f"{mixtral.__name__}.MixtralExperts._apply_gate"]


def test_the_names_of_lightning_are_those_of_lightning():
    theirs = MAIN.module("fabric.plugins.precision.precision")
    inputs = theirs._PRECISION_INPUT_STR, theirs._PRECISION_INPUT_INT, theirs._PRECISION_INPUT_STR_ALIAS
    assert set(OF_LIGHTNING) == {name for group in inputs for name in get_args(group)}
