"""Private names of Transformer Engine: the installed version has them, and a lost one is reported at set-up."""

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from lightning_lowprec.private.transformer_engine import check_names, moved
from lightning_lowprec.te import plugin
from lightning_lowprec.tools.doctor import availability


@pytest.fixture
def unchecked():
    """The check runs once per process; here it runs again."""
    check_names.cache_clear()
    yield
    check_names.cache_clear()


def test_the_installed_version_has_all_names():
    assert moved() == []


@pytest.mark.parametrize(
    ("owner", "name", "lost"),
    [
        (FP8GlobalStateManager, "reduce_and_update_fp8_tensors", "FP8GlobalStateManager.reduce_and_update_fp8_tensors"),
        (FP8GlobalStateManager, "quantization_state", "quantization_state.autocast_depth"),
        (distributed, "_get_module_fsdp_state", "distributed._get_module_fsdp_state"),
    ],
)
def test_a_name_that_is_gone(monkeypatch, unchecked, owner, name, lost):
    monkeypatch.delattr(owner, name)
    assert any(lost in words for words in moved())
    with pytest.raises(ImportError, match=rf"Transformer Engine 2\.\d+.* has no .*{name}"):
        plugin.pytorch()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    verdict = availability("fp8-hybrid-te", torch.device("cuda", 0))
    assert not verdict.runs
    assert "Install a version that has" in verdict.reason


def test_an_attribute_that_no_code_assigns(monkeypatch):
    class Other:
        def __init__(self):
            self.fp8 = self._fp8_workspaces

    monkeypatch.setattr(te, "Linear", Other)
    words = moved()
    assert "transformer_engine.pytorch.Linear()._fp8_workspaces" in words
    assert "transformer_engine.pytorch.Linear().fp8" not in words
