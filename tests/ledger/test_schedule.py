"""Phases of a schedule on CUDA tensors: which products run in which format, and what a phase in bf16 launches."""

import gc
from collections import Counter

import lightning as L
import pytest
import torch
from torch import nn

from benchmarks.ledger.recorder import recording
from lightning_lowprec import FP8TorchAO, HalfMixed
from tests.toys import Stack

LAYERS = 2
NAMES = {"float8": "fp8", "bfloat": "bf16"}
BACKWARD = {"grad_input": "bf16", "grad_weight": "bf16"}
FORWARD = {"forward": "bf16"}
TORCHAO = {
    "tensorwise": {},
    "rowwise": {"recipe": "rowwise"},
    "compiled": {"compile": True},
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


class Net(Stack):
    """The first layer's input needs a gradient, so each layer has three products."""

    def __init__(self):
        super().__init__(lambda: nn.Linear(64, 64), LAYERS)


def steps(plugin, phases):
    """For each phase: products by the dtype of their operands, and the names of all kernels, in the second step."""
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=plugin)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.zeros(32, 64, device="cuda", requires_grad=True)
    found = []
    for phase in range(phases):
        for _ in range(2):
            if plugin.phases is not None:
                plugin.set_step(phase)
            with recording() as log:
                fabric.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        products = Counter(NAMES[record.get("a")[:6]] for record in log.of("gemm"))
        found.append((dict(products), [record.name for record in log.of("kernel")]))
    return found


def schedule(*gemms):
    phases = [{"until": i + 1, **({} if choice is None else {"gemms": choice})} for i, choice in enumerate(gemms)]
    phases[-1].pop("until")
    return phases


@pytest.mark.parametrize("options", TORCHAO.values(), ids=TORCHAO)
def test_products_of_torchao_follow_the_phase(options):
    options = {"compile": False, **options}
    order = (None, FORWARD, "bf16", {"grad_input": "bf16"}, None)
    found = steps(FP8TorchAO(schedule=schedule(*order), **options), len(order))
    assert [products for products, _ in found] == [
        {"fp8": 3 * LAYERS},
        {"bf16": LAYERS, "fp8": 2 * LAYERS},
        {"bf16": 3 * LAYERS},
        {"bf16": LAYERS, "fp8": 2 * LAYERS},
        {"fp8": 3 * LAYERS},
    ]
    assert found[0][1] == found[4][1], "back to what was launched before"
    if options["compile"] is False:
        assert found[2][1] == steps(HalfMixed("bf16"), 1)[0][1], "nothing is encoded in a phase in bf16"
