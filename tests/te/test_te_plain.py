"""`plain(model)` of models with layers of Transformer Engine, and the tools that such layers refuse."""

import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TE, plain
from tests.precision.weights_left import exact_weights, same_bits, seen
from tests.te.reference import Net, current_scaling, fabric_for, te_linears

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{}, {"master_weights": "remainder"}], ids=["float32", "remainder"])
def test_the_model_is_the_one_before_with_the_trained_values(options, reference_te):
    model = Net()
    before = seen(model)
    fabric = fabric_for(FP8TE(current_scaling(), norms=False, **options))
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.backward(wrapped(X).square().mean())
    optimizer.step()
    expected = exact_weights(model)
    made = plain(wrapped, copy=True)
    assert model.blocks[0][1] in te_linears(model), "the model itself is as it was"
    assert plain(wrapped) is model
    assert seen(model) == before
    for plain_model in (model, made):
        assert same_bits({fqn: p.detach() for fqn, p in plain_model.named_parameters()}, expected)
    program = torch.export.export(model, (X,))
    torch.testing.assert_close(program.module()(X), model(X))


TOOLS = {
    "export": lambda net: torch.export.export(net, (X,)),
    "trace": lambda net: torch.jit.trace(net, X),
    "script": torch.jit.script,
}


@pytest.mark.parametrize("layer", [0, 1], ids=["norm", "linear"])
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tools_name_plain(tool, layer, pretend_gpu):
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
    fabric_for(FP8TE("current")).setup(model)
    with pytest.raises(Exception, match=r"(?s)`lightning_lowprec.plain\(model\)` first"):
        TOOLS[tool](model[layer : layer + 1].eval())
