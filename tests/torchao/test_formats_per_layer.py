"""One plugin, several formats: each layer computes as it does in a model of its own format alone."""

import re

import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.private.torchao import prototype_refusal

CPU = torch.device("cpu")
FORMATS = ["tensorwise", "rowwise", "block"] + ([] if prototype_refusal("mxfp8") else ["mxfp8"])


def converted(recipe, model, **options):
    plugin = FP8TorchAO(recipe, weights="keep", **options)
    plugin.bind_device(CPU)
    return plugin.convert_module(model), plugin


def layers(*names):
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(128, 64) for name in names})


def results(layer):
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output = layer(x)
    return output, *torch.autograd.grad(output.square().sum(), (x, layer.weight))


def test_each_layer_has_the_bits_of_its_own_format():
    mixed, plugin = converted({name: name for name in FORMATS}, layers(*FORMATS))
    assert plugin.plan.converted == tuple(FORMATS)
    for name in FORMATS:
        alone, _ = converted(name, layers(*FORMATS))
        found, expected = results(mixed[name]), results(alone[name])
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), name


@pytest.mark.skipif("mxfp8" not in FORMATS, reason="torchao has no MXFP8")
def test_features_that_one_format_cannot_multiply_stay_in_bf16():
    model = nn.ModuleDict({"mxfp8": nn.Linear(48, 48), "block": nn.Linear(48, 48)})
    _, plugin = converted({"mxfp8": "mxfp8", "block": "block"}, model)
    assert plugin.plan.converted == ("block",)
    assert plugin.plan.rows[0].kept_because == "features are no multiples of 32"


@pytest.mark.skipif("mxfp8" not in FORMATS, reason="torchao has no MXFP8")
def test_a_layer_whose_device_cannot_run_its_format_is_named():
    with pytest.raises(RuntimeError, match=r"`recipe='mxfp8'` of layer 'up' cannot run: .*'hopper'` is not valid"):
        converted({"up": "mxfp8", "*": "tensorwise"}, layers("up", "down"), emulate="hopper")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "mxfp8", "base": "fp16"}, "`base='fp16'` is not valid with `recipe='mxfp8'`: its kernels take"),
        (
            {"recipe": {"a": "block", "*": "tensorwise"}, "base": "fp16"},
            "with `recipe='block'`: its kernels return",
        ),
        ({"recipe": "block", "fast_accum": "all"}, "`fast_accum='all'` is not valid with `recipe='block'`"),
        ({"recipe": "mxfp8", "experts": "fp8"}, "`experts='fp8'` is not valid with `recipe='mxfp8'`"),
        ({"recipe": {"*": {"recipe": "blok", "forward": "bf16"}}}, r"`recipe['*']['recipe']='blok'` is not valid"),
    ],
)
def test_options_that_no_format_of_the_plugin_reads_raise(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        FP8TorchAO(**options)


def test_gathered_codes_have_one_kind_of_scale():
    _, plugin = converted({"a": "block", "*": "tensorwise"}, layers("a", "b"))
    assert plugin.gathers(None) == "'block' and 'tensorwise' in `recipe` have different scales"
