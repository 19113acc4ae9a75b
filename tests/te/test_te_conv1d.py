"""transformers' Conv1D by Transformer Engine: bit for bit a Linear with the transposed weight."""

import copy
import pickle

import lightning as L
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowprec import FP8TE
from lightning_lowprec.conversion import backends
from lightning_lowprec.te.layer import TEConv1D, te_linears
from tests.families import gpt2_runs
from tests.te import reference

IN, OUT = 64, 96


def pair():
    """A Conv1D, and the Linear that computes the same."""
    torch.manual_seed(0)
    conv, linear = Conv1D(OUT, IN), nn.Linear(IN, OUT)
    nn.init.normal_(conv.bias)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    return conv, linear


@pytest.mark.parametrize(("kind", "base"), [("current", "bf16"), ("current", "fp16"), ("nvfp4", "bf16")])
def test_every_product_is_that_of_a_linear(reference_te, kind, base):
    recipe = reference.nvfp4() if kind == "nvfp4" else reference.current_scaling()
    found = []
    for layer in pair():
        plugin = FP8TE(recipe, base=base)
        plugin.bind_device(torch.device("cpu"))
        plugin.convert_module(layer)
        x = torch.randn(3, 21, IN, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for number in range(2):  # two micro-batches: the quantised weight is used again
            with plugin.forward_context():
                output = layer(x)
            output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(number)).to(output.dtype))
        found.append((output, x.grad, layer.weight.grad, layer.bias.grad))
    ours, theirs = found
    for got, expected in zip(ours, (*theirs[:2], theirs[2].t(), theirs[3]), strict=True):
        assert torch.equal(got, expected)
    assert ours[2].is_contiguous()


def test_everything_of_a_conv1d_stays(reference_te):
    model = nn.Sequential(Conv1D(OUT, IN), nn.GELU(), Conv1D(IN, OUT).requires_grad_(False).eval())
    own = [set(vars(layer)) for layer in model]
    parameters, values = list(model.parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    plugin = FP8TE(reference.current_scaling(), weight_cache=True)
    plugin.bind_device(torch.device("cpu"))
    plugin.convert_module(model)
    assert [isinstance(layer, TEConv1D) for layer in te_linears(model)] == [True, True]
    assert isinstance(model[0], Conv1D)
    assert not isinstance(model[0], nn.Linear)
    assert not hasattr(model[0], "reset_parameters")
    assert repr(model[0]) == f"TEConv1D(nf={OUT}, nx={IN})"
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    with plugin.forward_context():
        model(torch.randn(5, IN)).sum().backward()
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in values.items()}
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(layer) for layer in again] == [type(layer) for layer in model]
        assert all(torch.equal(value, values[name]) for name, value in again.state_dict().items())
    backends.revert_all(model)
    assert [type(layer) for layer in model] == [Conv1D, nn.GELU, Conv1D]
    assert [set(vars(layer)) for layer in model] == own


def test_gpt2_trains_as_in_bf16(reference_te):
    plugin = FP8TE(reference.current_scaling(), norms=False)
    ours, model = gpt2_runs.losses_by(L.Fabric(accelerator="cpu", plugins=plugin))
    assert sum(isinstance(layer, TEConv1D) for layer in te_linears(model)) == 8
    bf16, _ = gpt2_runs.losses_by(L.Fabric(accelerator="cpu", precision="bf16-mixed"))
    assert gpt2_runs.last(bf16) < 0.7 * bf16[0]
    assert gpt2_runs.last(ours) < 1.01 * gpt2_runs.last(bf16)
