"""Codes of weights, made once in each forward: the results of encoding at every product, and fewer bytes read."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO
from tests.toys import Residual, Stack

X = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(1))  # 21 tokens: rows are padded


class Net(Stack):
    def __init__(self):
        layers = lambda: Residual(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False))  # noqa: E731
        super().__init__(layers, seed=0)


def loss_of(model, x=X):
    return (model(x) - 1).float().square().mean()


def set_up(codes="per_forward", **options):
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=FP8TorchAO(weight_codes=codes, **options))
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return fabric, net, model, optimizer


def run(codes, micro_batches=2, steps=3, **options):
    fabric, net, model, optimizer = set_up(codes, **options)
    losses = []
    for _ in range(steps):
        for _ in range(micro_batches):
            loss = loss_of(model)
            fabric.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in net.parameters()]


def same(left, right):
    return left[0] == right[0] and all(map(torch.equal, left[1], right[1]))


OPTIONS = [
    {},
    {"base": "fp16"},
    {"fp8_format": "e4m3"},
    {"round_scales_to_power_of_2": True},
    {"master_weights": True},
    {"master_weights": "remainder"},
    {"compile": {"backend": "aot_eager"}},
]


@pytest.mark.slow("{'compile': {'backend': 'aot_eager'}}")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_are_those_of_encoding_at_every_product(options):
    assert same(run("per_forward", **options), run("per_gemm", **options))


def test_a_frozen_weight_keeps_nothing_of_its_input():
    """As under LoRA, whose base layers do not train."""
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=FP8TorchAO(weight_codes="per_gemm"))
    fabric.setup_module(layer := nn.Linear(64, 32).requires_grad_(False))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), fabric.autocast():
        assert layer(X.clone().requires_grad_()).requires_grad
    assert all(t.data_ptr() == layer.weight.data_ptr() for t in kept)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_row_scales_are_encoded_at_every_product(recipe):
    assert FP8TorchAO(recipe).weight_codes == "per_gemm"
    with pytest.raises(ValueError, match="which does not read it; it is for 'tensorwise'"):
        FP8TorchAO(recipe, weight_codes="per_forward")
