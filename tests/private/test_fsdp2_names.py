"""The private names of torch and Lightning that 'fsdp2' rests on: they are there, and set-up fails without them."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch import strategies
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import _dtensor_spec

from lightning_lowprec import FabricFSDP2Strategy, FSDP2Strategy
from lightning_lowprec.private import lightning as of_lightning
from lightning_lowprec.private import torch as of_torch


def test_this_torch_and_this_lightning_have_them():
    assert of_torch.moved() == of_lightning.moved() == []
    connector = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)._signal_connector
    assert all(hasattr(connector, name) for name in of_lightning.SIGNAL_NAMES)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (FSDPModule, "_get_fsdp_state"),
        (_dtensor_spec, "TensorMeta"),
        (torch, "_foreach_norm"),
    ],
)
def test_a_torch_without_a_name_fails_at_set_up(monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    assert [missing for missing in of_torch.moved() if f"{name}, needed for 'fsdp2'" in missing]
    for build, strategy in ((L.Fabric, FabricFSDP2Strategy()), (L.Trainer, FSDP2Strategy())):
        with pytest.raises(ImportError, match=rf"torch {torch.__version__[:4]}.* no longer has .*{name}"):
            build(accelerator="cpu", devices=1, strategy=strategy, precision="fp8-hybrid")


def test_a_torch_that_keeps_its_parameter_groups_elsewhere(monkeypatch):
    monkeypatch.setattr(of_torch, "PARAM_GROUPS", ("_groups_of_old", "_groups_of_today"))
    name = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState()._groups_of_old"
    assert of_torch.moved() == [f"{name}, needed for 'fsdp2'"]


@pytest.mark.parametrize("name", of_lightning.MODEL_PARALLEL_NAMES)
def test_a_lightning_without_a_name_fails_at_set_up(monkeypatch, name):
    original = strategies.ModelParallelStrategy.__init__
    renamed = [f"{other}_moved" if other == name else other for other in original.__code__.co_names]
    monkeypatch.setattr(original, "__code__", original.__code__.replace(co_names=tuple(renamed)))
    assert of_lightning.moved() == [f"ModelParallelStrategy.{name}"]
    with pytest.raises(ImportError, match=rf"lightning {L.__version__} has moved {name} of ModelParallelStrategy"):
        FSDP2Strategy()


def test_moved_signal_names_leave_lightnings_own_handler(monkeypatch):
    of_lightning.note_sigterm(SimpleNamespace(_signal_connector=SimpleNamespace()))
    monkeypatch.delattr(_SignalConnector, "_sigterm_notifier_fn")
    assert of_lightning.moved() == ["_SignalConnector._sigterm_notifier_fn"]


def test_a_sigterm_is_noted_once_and_passed_on():
    killed = []
    connector = SimpleNamespace(received_sigterm=False, _sigterm_notifier_fn=None)
    launcher = SimpleNamespace(kill=killed.append)
    of_lightning.note_sigterm(SimpleNamespace(_signal_connector=connector, strategy=SimpleNamespace(launcher=launcher)))
    connector._sigterm_notifier_fn(15, None)
    connector._sigterm_notifier_fn(15, None)
    assert connector.received_sigterm
    assert killed == [15]
