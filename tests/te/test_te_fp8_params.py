"""Weights that are kept in FP8 from step to step, trained by Transformer Engine's reference quantizers."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowprec import FP8TE, FabricFSDP2Strategy
from tests.te.reference import Net, counting_current_scaling, current_scaling, fabric_for, te_linears


def set_up(recipe=None, **options):
    plugin = FP8TE(recipe or current_scaling(), norms=False, **options)
    fabric, model = fabric_for(plugin), Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return fabric, *fabric.setup(model, optimizer)


def batches(count):
    return torch.randn(count, 16, 32, generator=torch.Generator().manual_seed(0))


def train(fabric, wrapped, optimizer, steps=3, micro_batches=2):
    losses = []
    for x in batches(steps * micro_batches):
        loss = F.mse_loss(wrapped(x), x[:, :16])
        fabric.backward(loss / micro_batches)
        losses.append(loss.item())
        if len(losses) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_weights_are_quantised_once_per_step_kept_for_evaluation_and_freed_by_a_set_up_without(reference_te):
    counts, plain_counts = [], []
    plain = train(*set_up(counting_current_scaling(plain_counts)))
    fabric, wrapped, optimizer = set_up(counting_current_scaling(counts), fp8_params=True)
    assert train(fabric, wrapped, optimizer) == plain
    assert len(plain_counts) == 6 * 3 * 2  # layers, steps, micro-batches
    assert len(counts) == 6 * 3
    counts.clear()
    wrapped.eval()
    with torch.no_grad():
        outputs = [wrapped(batches(1)[0]) for _ in range(3)]
    assert len(counts) == 6
    assert torch.equal(outputs[0], outputs[2])
    _, fresh, _ = set_up()
    fresh.load_state_dict(wrapped.state_dict())
    with torch.no_grad():
        assert torch.equal(outputs[0], fresh.eval()(batches(1)[0]))
    model = wrapped.module
    assert all(layer._fp8_workspaces for layer in te_linears(model))
    fabric_for(FP8TE(current_scaling(), norms=False)).setup(model)
    assert not any(layer.keep_weights for layer in te_linears(model))
    assert not any(layer._fp8_workspaces for layer in te_linears(model))


def test_an_input_that_needs_a_gradient_later(reference_te):
    """What was kept for inputs that need none has no transpose."""
    found = []
    for cached in (True, False):
        torch.manual_seed(0)
        layer, x = nn.Linear(32, 32), torch.randn(32, 32)
        fabric = fabric_for(FP8TE(current_scaling(), fp8_params=cached))
        wrapped = fabric.setup(layer)
        for _ in range(3):
            fabric.backward(wrapped(x).square().mean())
        x.requires_grad_()
        for _ in range(2):
            fabric.backward(wrapped(x).square().mean())
        found.append((x.grad, layer.weight.grad))
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


WRITES = {  # as PEFT merges, in place and safely, and as torch writes
    "data": lambda model: [*(p.data.mul_(2) for p in model.parameters()), model.eval()],
    "other memory": lambda model: [setattr(p, "data", 2 * p.data) for p in model.parameters()],
    "parameters": lambda model: [p.mul_(2) for p in model.parameters()],
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_weights_that_change_between_two_evaluations(reference_te, write):
    _, wrapped, _ = set_up(fp8_params=True)
    x = batches(1)[0]
    with torch.no_grad():
        wrapped.eval()(x)
        write(wrapped)
        _, fresh, _ = set_up()
        fresh.load_state_dict(wrapped.state_dict())
        assert torch.equal(wrapped(x), fresh.eval()(x))


@pytest.mark.parametrize("gather", ["auto", True, False])
def test_sharded_weights_are_refused(gather):
    plugin = FP8TE("current", fp8_params=True)
    message = r"`fp8_params=True` is not possible under FSDP2: .* with `FSDP2Strategy\(fp8_all_gather=True\)`"
    with pytest.raises(ValueError, match=message):
        L.Fabric(accelerator="cpu", devices=1, strategy=FabricFSDP2Strategy(fp8_all_gather=gather), plugins=plugin)
