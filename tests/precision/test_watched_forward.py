"""The watch over the first training forwards: it counts as torch's counter does, changes nothing, and ends."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

import lightning_lowprec  # noqa: F401  # registers the names
from lightning_lowprec.precision.layer_calls import LayerCalls

TOKENS, WIDTH = 32, 64


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.conv, self.up = nn.Linear(64, 96), nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(6, 2, 3, stride=2)

    def forward(self, x, image, query, key, value):
        attention = F.scaled_dot_product_attention(query, key, value)
        batched = torch.baddbmm(query[0], query[0], key[0].mT @ value[0])
        return [self.linear(x), self.linear(x[None].mT.mT), self.up(self.conv(image)), attention, batched]


def test_the_flops_are_those_of_torchs_counter():
    model, shape = Everything(), (2, 4, 16, 16)
    inputs = (torch.randn(32, 64), torch.randn(2, 4, 12, 12), *(torch.randn(shape) for _ in range(3)))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        LayerCalls([model]) as calls,
        FlopCounterMode(display=False) as torchs,
    ):
        model(*inputs)
    attention = 4 * 2 * 4 * 16 * 16 * 16
    counted = any("attention" in str(operation) for operation in torchs.get_flop_counts()["Global"])  # from torch 2.15
    assert calls.others.total() == torchs.get_total_flops() + (0 if counted else attention)


def test_grouped_products_and_the_chunked_loss_of_torch_count():
    tokens, experts, inner = 32, 4, 128
    x, weight = torch.randn(tokens, WIDTH), torch.randn(experts, WIDTH, inner)
    with LayerCalls([nn.Linear(1, 1)]) as calls:
        F.grouped_mm(x, weight, offs=torch.arange(8, 33, 8, dtype=torch.int32))
    assert calls.others.total() == 2 * tokens * WIDTH * inner
    options = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options").LinearCrossEntropyOptions()
    with LayerCalls([nn.Linear(1, 1)]) as calls:
        F.linear_cross_entropy(x, torch.randn(inner, WIDTH), torch.zeros(tokens, dtype=torch.long), options=options)
    assert calls.others.total() == 2 * tokens * WIDTH * inner


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_run_under_the_watch(layout):
    layer = nn.Linear(64, 96)
    nested = torch.nested.nested_tensor([torch.randn(3, 64), torch.randn(5, 64)], layout=layout)
    with torch.autocast("cpu", dtype=torch.bfloat16), LayerCalls([layer]) as calls:
        layer(nested)
    assert calls.share is None


def test_two_training_forwards_and_equal_gradients():
    """The watch changes no value, and ends; evaluation, and a precision that converts nothing, have none."""
    gradients = []
    for watched in (2, 0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        fabric = L.Fabric(precision="fp8-hybrid", accelerator="cpu")
        wrapped = fabric.setup(model)
        plugin = fabric.strategy.precision
        assert plugin.modules.watched_forwards == 2
        plugin.modules.watched_forwards = watched
        wrapped.eval()
        with torch.no_grad():
            wrapped(torch.randn(TOKENS, WIDTH))
        assert plugin.modules.watched_forwards == watched, "evaluation is not watched"
        wrapped.train()
        fabric.backward(wrapped(torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH)).square().mean())
        gradients.append([p.grad for p in model.parameters()])
        assert plugin.modules.watched_forwards == max(watched - 1, 0)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    fabric = L.Fabric(precision="half-auto", accelerator="cpu")
    fabric.setup(nn.Linear(WIDTH, WIDTH))(torch.randn(TOKENS, WIDTH))
    assert fabric.strategy.precision.modules.watched_forwards == 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return F.relu(x * self.weight)


@pytest.mark.parametrize("watched", [True, False])
def test_a_compiled_block_compiles_once_for_all_steps(watched):
    counter = CompileCounter()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())
    model[1].compile(backend=counter, fullgraph=True)
    fabric = L.Fabric(precision="fp8-hybrid", accelerator="cpu")
    wrapped = fabric.setup(model)
    fabric.strategy.precision.modules.watched_forwards *= watched
    for _ in range(4):
        fabric.backward(wrapped(torch.randn(TOKENS, WIDTH)).square().mean())
    assert counter.frame_count == 1
