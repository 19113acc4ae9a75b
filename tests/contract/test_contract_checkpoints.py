"""Checkpoints are those of the plain model: any precision, and no precision, loads them."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_models import Net, assert_same_tensors, fabric_with, net, random_batches, train_in_fabric, trainer_with
from plugins_under_test import every_plugin, make, weight_dtype

from lightning_lowprec import FP8TorchAO, HalfMixed
from lightning_lowprec.masters import moments
from tests.precision.weights_left import as_trained

REPRESENTATIVES: dict[str, Callable[[], Any]] = {
    "stock 32-true": lambda: "32-true",
    "stock bf16-mixed": lambda: "bf16-mixed",
    "HalfMixed-fp16": lambda: HalfMixed("fp16"),
    "FP8TorchAO": lambda: FP8TorchAO(),
    "FP8TorchAO-rowwise": lambda: FP8TorchAO("rowwise"),
    "FP8TorchAO-fp16": lambda: FP8TorchAO(base="fp16"),
}
PAIRS = list(itertools.product(REPRESENTATIVES, repeat=2))
PAIR_IDS = [f"{source} into {target}" for source, target in PAIRS]


def save_with_trainer(plugin: Any, path: Path) -> None:
    trainer = trainer_with(plugin)
    trainer.fit(net(), random_batches(3))
    trainer.save_checkpoint(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One Trainer checkpoint of each representative."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {name: folder / f"{name}.ckpt" for name in REPRESENTATIVES}
    for name, path in paths.items():
        save_with_trainer(REPRESENTATIVES[name](), path)
    return paths


@every_plugin
def test_trainer_checkpoint_needs_no_pickle_and_has_the_plain_state_dict(name: str, tmp_path: Path) -> None:
    """As that of 32-true does: plain tensors under plain names. Masters add a tensor per weight to the optimizer's."""
    for plugin, path in ((as_trained(make(name)), tmp_path / "ours.ckpt"), ("32-true", tmp_path / "stock.ckpt")):
        save_with_trainer(plugin, path)
    ours = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    stock = torch.load(tmp_path / "stock.ckpt", weights_only=True)
    own_key = {type(make(name)).__qualname__}
    assert ours.keys() - own_key == stock.keys()
    if make(name).masters is not None:
        stock["state_dict"] = net().to(weight_dtype(name)).state_dict()
        for state in ours["optimizer_states"]:
            state["param_groups"][0].pop("rounding_step", None)
            for kept, dtype in (("master_param", torch.float32), ("master_remainder", torch.int16)):
                values = [entry.pop(kept, None) for entry in state["state"].values()]
                assert all(value is None or value.dtype is dtype for value in values)
            for entry in state["state"].values():  # moments of 8 bits stand for those of AdamW
                for moment in list(moments.coded(entry)):
                    assert entry.pop(f"{moment}_exponents").dtype is torch.uint8
                    entry[moment] = torch.empty(entry.pop(f"{moment}_codes").shape)
    for part in ("state_dict", "optimizer_states"):
        assert_same_layout(ours[part], stock[part])


def assert_same_layout(a: Any, b: Any) -> None:
    """Equal keys in equal order, shapes, dtypes and types."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same_layout(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_layout(x, y)


@every_plugin
def test_fabric_checkpoint_needs_no_pickle_and_has_the_plain_state_dict(name: str, tmp_path: Path) -> None:
    fabric, module = fabric_with(make(name)), net()
    wrapped, optimizer = fabric.setup(module, module.configure_optimizers())
    train_in_fabric(fabric, wrapped, optimizer, random_batches(2))
    state = {"model": wrapped, "optimizer": optimizer, "precision": fabric.strategy.precision}
    fabric.save(tmp_path / "ours.ckpt", state)
    loaded = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    assert_same_layout(dict(loaded["model"]), dict(net().to(weight_dtype(name)).state_dict()))
    plain = net().to(weight_dtype(name))
    plain.load_state_dict(loaded["model"], strict=True)
    assert_same_tensors(dict(plain.state_dict()), dict(module.state_dict()))


class Snapshot(Net):
    """Copies of weights and optimizer state as they are when training starts."""

    def on_train_start(self) -> None:
        self.weights = {key: value.clone() for key, value in self.state_dict().items()}
        state = self.optimizers().state_dict()["state"]
        self.moments = {i: {key: value.clone() for key, value in s.items()} for i, s in state.items()}


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=PAIR_IDS)
def test_any_precision_loads_the_checkpoint_of_any_other(source: str, target: str, saved: dict[str, Path]) -> None:
    checkpoint, module = torch.load(saved[source], weights_only=True), Snapshot()
    assert_same_tensors(dict(Net.load_from_checkpoint(saved[source]).state_dict()), dict(checkpoint["state_dict"]))
    trainer = trainer_with(REPRESENTATIVES[target](), max_epochs=2)
    trainer.fit(module, random_batches(3), ckpt_path=saved[source])
    assert_same_tensors(module.weights, dict(checkpoint["state_dict"]))
    assert_same_tensors(module.moments, checkpoint["optimizer_states"][0]["state"])
    assert len(module.losses) == 3  # and training goes on
    assert all(torch.isfinite(loss) for loss in module.losses)


@pytest.fixture(scope="module")
def saved_by_fabric(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fabric")
    paths = {name: folder / f"{name}.ckpt" for name in REPRESENTATIVES}
    for name, path in paths.items():
        fabric, module = fabric_with(REPRESENTATIVES[name]()), net()
        wrapped, optimizer = fabric.setup(module, module.configure_optimizers())
        train_in_fabric(fabric, wrapped, optimizer, random_batches(2))
        fabric.save(path, {"model": wrapped, "optimizer": optimizer, "precision": fabric.strategy.precision})
    return paths


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=PAIR_IDS)
def test_fabric_loads_the_checkpoint_of_any_precision(
    source: str, target: str, saved_by_fabric: dict[str, Path]
) -> None:
    fabric, module = fabric_with(REPRESENTATIVES[target]()), Net()
    wrapped, optimizer = fabric.setup(module, module.configure_optimizers())
    state = {"model": wrapped, "optimizer": optimizer, "precision": fabric.strategy.precision}
    fabric.load(saved_by_fabric[source], state)
    checkpoint = torch.load(saved_by_fabric[source], weights_only=True)
    assert_same_tensors(dict(module.state_dict()), dict(checkpoint["model"]))
    assert_same_tensors(optimizer.state_dict()["state"], checkpoint["optimizer"]["state"])
    assert all(map(torch.isfinite, map(torch.tensor, train_in_fabric(fabric, wrapped, optimizer, random_batches(1)))))
