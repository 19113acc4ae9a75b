"""Save, resume, continue: bit-exact, in the Trainer and in Fabric, the loss scale included."""

from pathlib import Path
from typing import Any

import lightning as L
import lightning.fabric.plugins as fabric_plugins
import pytest
import torch
from contract_models import (
    Net,
    assert_same_tensors,
    fabric_with,
    net,
    random_batches,
    scale_of,
    train_in_fabric,
    trainer_with,
)
from lightning.pytorch.plugins import MixedPrecision
from plugins_under_test import every_plugin, every_scaled, make

from lightning_lowprec import FP8TorchAO, HalfMixed, LossScale
from tests.precision.weights_left import as_trained

GROWING = LossScale(initial=2.0**8, growth_interval=3)
"""Eight good steps with this grow the scale twice, to 2^10, and leave two good steps on the counter."""
EPOCHS, BATCHES = 4, 4


def fit(plugin: Any, module: Net, epochs: int, ckpt_path: Path | None = None) -> L.Trainer:
    trainer = trainer_with(plugin, max_epochs=epochs)
    trainer.fit(module, random_batches(BATCHES), ckpt_path=ckpt_path)
    return trainer


@every_plugin
def test_trainer_resumes_bit_exactly(name: str, tmp_path: Path) -> None:
    whole, whole_plugin = net(), as_trained(make(name, GROWING))
    optimizer = fit(whole_plugin, whole, EPOCHS).optimizers[0]

    first, path = net(), tmp_path / "half.ckpt"
    fit(as_trained(make(name, GROWING)), first, EPOCHS // 2).save_checkpoint(path)
    second, plugin = Net(), as_trained(make(name, GROWING))
    resumed = fit(plugin, second, EPOCHS, ckpt_path=path)

    assert_same_tensors(first.losses + second.losses, whole.losses)
    assert_same_tensors(second.state_dict(), whole.state_dict())
    assert_same_tensors(resumed.optimizers[0].state_dict(), optimizer.state_dict())
    if plugin.scaler is not None:
        assert scale_of(plugin) == scale_of(whole_plugin) == 2.0**8 * 2 ** (EPOCHS * BATCHES // 3)
        assert plugin.scaler.state_dict() == whole_plugin.scaler.state_dict()


def fabric_run(plugin: Any, epochs: int, load: Path | None = None, save: Path | None = None) -> tuple[Any, Any, Any]:
    """Train for some epochs after loading, before saving."""
    fabric, module = fabric_with(plugin), net() if load is None else Net()
    wrapped, optimizer = fabric.setup(module, module.configure_optimizers())
    state = {"model": wrapped, "optimizer": optimizer, "precision": fabric.strategy.precision}
    if load is not None:
        fabric.load(load, state)
    losses = []
    for _ in range(epochs):
        losses += train_in_fabric(fabric, wrapped, optimizer, random_batches(BATCHES))
    if save is not None:
        fabric.save(save, state)
    return losses, module.state_dict(), optimizer.state_dict()


@every_plugin
def test_fabric_resumes_bit_exactly(name: str, tmp_path: Path) -> None:
    path, whole_plugin, plugin = tmp_path / "half.ckpt", make(name, GROWING), make(name, GROWING)
    whole = fabric_run(whole_plugin, EPOCHS)
    first = fabric_run(make(name, GROWING), EPOCHS // 2, save=path)
    second = fabric_run(plugin, EPOCHS - EPOCHS // 2, load=path)
    assert first[0] + second[0] == whole[0]
    assert_same_tensors(second[1:], whole[1:])
    assert scale_of(plugin) == scale_of(whole_plugin)


@every_scaled
def test_saved_loss_scale_is_that_of_the_run(name: str, tmp_path: Path) -> None:
    """And it overrides the initial scale that the resuming run was given."""
    fit(make(name, GROWING), net(), 2).save_checkpoint(tmp_path / "a.ckpt")
    other = LossScale(initial=4.0, growth_interval=1000)
    plugin = make(name, other)
    fit(plugin, Net(), 2, ckpt_path=tmp_path / "a.ckpt")
    assert scale_of(plugin) == 2.0**10
    assert plugin.scaler.state_dict()["_growth_tracker"] == 2
    assert plugin.scaler.config == other  # how the scale moves is this run's choice


# ---- checkpoints of Lightning's own fp16, and precisions that need no scale

STOCK_SCALE = 2.0**9


@pytest.fixture(scope="module")
def stock_fp16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Lightning's MixedPrecision("16-mixed"): one growth and one good step after it."""
    path = tmp_path_factory.mktemp("stock") / "stock.ckpt"
    scaler = torch.amp.GradScaler("cpu", init_scale=STOCK_SCALE / 2, growth_interval=3)
    fit(MixedPrecision("16-mixed", "cpu", scaler), net(), 1).save_checkpoint(path)
    return path


@every_scaled
def test_stock_fp16_checkpoint_hands_on_its_loss_scale(name: str, stock_fp16: Path) -> None:
    plugin = make(name)
    fit(plugin, Net(), 1, ckpt_path=stock_fp16)
    assert scale_of(plugin) == STOCK_SCALE
    assert plugin.scaler.state_dict()["_growth_tracker"] == 1


@every_scaled
def test_stock_fabric_checkpoint_hands_on_its_loss_scale(name: str, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=STOCK_SCALE / 2, growth_interval=3)
    fabric_run(fabric_plugins.MixedPrecision("16-mixed", "cpu", scaler), 1, save=tmp_path / "a.ckpt")
    plugin = make(name)
    fabric_run(plugin, 0, load=tmp_path / "a.ckpt")
    assert scale_of(plugin) == STOCK_SCALE
    assert plugin.scaler.state_dict()["_growth_tracker"] == 1


DROPPED = "Dropped the loss scale of the checkpoint"


@pytest.mark.parametrize("source", ["stock", "HalfMixed", "FP8TorchAO"])
@pytest.mark.parametrize("target", [HalfMixed, FP8TorchAO])
def test_loss_scale_without_use_is_dropped_with_one_line(
    source: str, target: Any, stock_fp16: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, half = stock_fp16, tmp_path / "half.ckpt"
    if source != "stock":
        plugin = HalfMixed("fp16") if source == "HalfMixed" else FP8TorchAO(base="fp16")
        fit(plugin, net(), 1).save_checkpoint(path := half)
    plugin = HalfMixed("bf16") if target is HalfMixed else FP8TorchAO()
    with caplog.at_level("INFO"):
        fit(plugin, Net(), 1, ckpt_path=path)
    lines = [record.getMessage() for record in caplog.records if DROPPED in record.getMessage()]
    assert len(lines) == 1
    assert plugin.precision in lines[0]


@every_scaled
def test_checkpoint_without_a_scale_starts_at_the_initial_one(name: str, tmp_path: Path) -> None:
    fit(HalfMixed("bf16"), net(), 1).save_checkpoint(tmp_path / "a.ckpt")
    plugin = make(name, GROWING)
    fit(plugin, Net(), 1, ckpt_path=tmp_path / "a.ckpt")
    assert scale_of(plugin) == GROWING.initial


@pytest.mark.parametrize("target", [HalfMixed, FP8TorchAO])
def test_without_a_loss_scale_in_the_checkpoint_nothing_is_logged(
    target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(FP8TorchAO(), net(), 1).save_checkpoint(tmp_path / "a.ckpt")
    with caplog.at_level("INFO"):
        fit(target("bf16") if target is HalfMixed else target(), Net(), 1, ckpt_path=tmp_path / "a.ckpt")
    assert not [record for record in caplog.records if DROPPED in record.getMessage()]
