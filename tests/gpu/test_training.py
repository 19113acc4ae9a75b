"""Training through Trainer and Fabric in every precision: the loss falls, resuming is exact, NaN costs what it says."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec.names import TABLE
from tests.gpu.device import DEVICE, NO_VALUES, on_gpu_only
from tests.gpu.subjects import FP8_NAMES, NAMES, WIDTH, Stack, Subject, loader, runs_here, trainer


@pytest.fixture(autouse=True)
def no_compilation(monkeypatch):
    """The tests of this file are about training; tests/gpu/test_compile.py has the rest."""
    monkeypatch.setattr("torch.nn.Module.compile", lambda self, *args, **kwargs: None)


def skip_unless_it_runs(name):
    reason = runs_here(name)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls_in_the_trainer(name):
    skip_unless_it_runs(name)
    model = Subject()
    trainer(precision=name, max_epochs=15).fit(model, loader())
    assert model.losses[-1] < 0.8 * model.losses[0] or NO_VALUES
    assert model.devices == {DEVICE.type}


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls_in_fabric(name):
    skip_unless_it_runs(name)
    torch.manual_seed(0)
    fabric = L.Fabric(accelerator=DEVICE.type, devices=1, precision=name)
    module = fabric.setup_module(Stack())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=3e-3))
    found = []
    for _ in range(15):
        for x, y in fabric.setup_dataloaders(loader()):
            loss = nn.functional.mse_loss(module(x).float(), y)
            fabric.backward(loss)
            fabric.clip_gradients(module, optimizer, max_norm=1.0, error_if_nonfinite=not NO_VALUES)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
    assert found[-1] < 0.8 * found[0] or NO_VALUES


@pytest.mark.parametrize("name", NAMES)
def test_resuming_is_exact(name, tmp_path):
    skip_unless_it_runs(name)
    through, first, second = Subject(), Subject(), Subject()
    trainer(precision=name, max_epochs=4).fit(through, loader())
    half = trainer(precision=name, max_epochs=2)
    half.fit(first, loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    trainer(precision=name, max_epochs=4).fit(second, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert first.losses + second.losses == through.losses or NO_VALUES
    for (fqn, wanted), found in zip(through.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(wanted, found) or NO_VALUES, fqn


@pytest.mark.parametrize("name", [name for name in NAMES if "eval" not in name])
def test_a_nan_batch_costs_one_step_in_fp16_and_where_steps_are_skipped(name):
    skip_unless_it_runs(name)
    row = TABLE[name]
    plugin = row.plugin(**row.options, skip_nonfinite=True)
    fabric = L.Fabric(accelerator=DEVICE.type, devices=1, plugins=plugin)
    module = fabric.setup_module(Stack())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-3))

    def step(x):
        fabric.backward(module(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    good = torch.randn(32, WIDTH, device=DEVICE)
    for _ in range(3):
        step(good)
    before = [p.detach().clone() for p in module.parameters()]
    step(torch.full_like(good, float("nan")))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)) or NO_VALUES
    assert plugin.skipped_steps == 1 or NO_VALUES
    step(good)
    assert all(torch.isfinite(p).all() for p in module.parameters()) or NO_VALUES
    assert not all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)) or NO_VALUES


@pytest.mark.parametrize("name", [name for name in FP8_NAMES if "fp16" not in name])
def test_a_nan_batch_does_in_bf16_what_lightning_does_and_leaves_nothing_behind(name):
    skip_unless_it_runs(name)
    fabric = L.Fabric(accelerator=DEVICE.type, devices=1, precision=name)
    module = fabric.setup_module(Stack())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=1e-3))
    good = {fqn: value.clone() for fqn, value in module.state_dict().items()}
    x = torch.randn(32, WIDTH, device=DEVICE)
    fabric.backward(module(torch.full_like(x, float("nan"))).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    assert not all(torch.isfinite(p).all() for p in module.parameters()) or NO_VALUES, (
        "as Lightning's bf16-mixed: it steps"
    )
    module.load_state_dict(good)
    loss = module(x).pow(2).mean()
    fabric.backward(loss)
    assert torch.isfinite(loss) or NO_VALUES
    assert all(torch.isfinite(p.grad).all() for p in module.parameters()) or NO_VALUES, "a scale stayed non-finite"


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("name", FP8_NAMES)
def test_validate_test_and_predict(name, inference_mode):
    skip_unless_it_runs(name)
    model, run = Subject(), None
    run = trainer(precision=name, max_epochs=1, inference_mode=inference_mode)
    run.fit(model, loader(), loader(2, tokens=13))
    validated = run.validate(model, loader(2, tokens=13), verbose=False)[0]["val_loss"]
    tested = run.test(model, loader(2, tokens=13), verbose=False)[0]["test_loss"]
    assert validated == pytest.approx(tested) or NO_VALUES
    outputs = run.predict(model, loader(2, tokens=13))
    assert all(torch.isfinite(output).all() for output in outputs) or NO_VALUES
    run = trainer(precision=name, max_epochs=2, inference_mode=inference_mode)
    run.fit(model, loader())  # training after inference


@on_gpu_only
@pytest.mark.parametrize("name", FP8_NAMES)
def test_a_model_may_move_after_setup(name):
    skip_unless_it_runs(name)
    fabric = L.Fabric(accelerator="cuda", devices=1, precision=name)
    model = Stack()
    module = fabric.setup_module(model, move_to_device=False)
    assert next(model.parameters()).device.type == "cpu"
    model.to(DEVICE)
    loss = module(torch.randn(24, WIDTH, device=DEVICE)).pow(2).mean()
    fabric.backward(loss)
    assert all(p.grad is not None and p.grad.device.type == "cuda" for p in model.parameters())
