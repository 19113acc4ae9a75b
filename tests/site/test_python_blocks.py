"""Every Python block on the README and the site runs; those that need other machines are checked by signatures."""

import pytest
import torch

from lightning_lowprec.conversion import backends
from tests.site.pages import ROOT, Block, blocks
from tests.site.python_blocks import READ, check_read, surroundings

pytestmark = pytest.mark.slow

PYTHON = blocks("python")
RUN = [block for block in PYTHON if block.name not in READ]


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`:UserWarning")
@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
def test_the_block_runs(block: Block, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    before = backends.registered()
    try:
        exec(compile(shortened(block.code), block.name, "exec"), surroundings(block.name))
    finally:
        for backend in backends.registered():
            if backend not in before:
                backends.unregister(backend.name)


def shortened(code: str) -> str:
    """Train for 2 steps where the reader trains for 100."""
    return code.replace("max_steps=100", "max_steps=2, limit_val_batches=1, logger=False, enable_checkpointing=False")


@pytest.mark.parametrize("name", READ)
def test_a_block_that_needs_another_machine_has_valid_calls(name: str):
    (block,) = [block for block in PYTHON if block.name == name]
    check_read(block.code)
    assert (ROOT / READ[name]).is_file()


def test_a_wrong_call_is_found():
    assert check_read("L.Trainer(precision='fp8-hybrid')") == 1
    with pytest.raises(TypeError, match="recip"):
        check_read("FP8TorchAO(recip='rowwise')")
    with pytest.raises(AttributeError):
        check_read("lightning_lowprec.exported(model)")
