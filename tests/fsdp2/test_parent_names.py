"""The private names of Lightning that the strategies rest on: there, and what happens without them."""

from types import SimpleNamespace

import lightning as L
import pytest

from lightning_lowprec.fsdp2.fabric import FabricFSDP2Strategy
from lightning_lowprec.fsdp2.lightning_parts import NAMES, SIGNAL_NAMES, check_parent, note_sigterm
from lightning_lowprec.fsdp2.trainer import FSDP2Strategy


def test_this_lightning_has_them():
    for strategy in (FSDP2Strategy(), FabricFSDP2Strategy()):
        assert all(hasattr(strategy, name) for name in NAMES)
    connector = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)._signal_connector
    assert all(hasattr(connector, name) for name in SIGNAL_NAMES)


def test_a_sigterm_is_noted_once_and_passed_on():
    killed = []
    connector = SimpleNamespace(received_sigterm=False, _sigterm_notifier_fn=None)
    launcher = SimpleNamespace(kill=killed.append)
    note_sigterm(SimpleNamespace(_signal_connector=connector, strategy=SimpleNamespace(launcher=launcher)))
    connector._sigterm_notifier_fn(15, None)
    connector._sigterm_notifier_fn(15, None)
    assert connector.received_sigterm
    assert killed == [15]


def test_without_them():
    note_sigterm(SimpleNamespace(_signal_connector=SimpleNamespace()))  # Lightning keeps its own handler
    with pytest.raises(ImportError, match="has moved _data_parallel_size, _tensor_parallel_size, _device_mesh"):
        check_parent(object())
