"""One folder by the ranks of DDP."""

import json
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import load_file

import lightning_lowprec
from tests.fsdp2.ranks import server
from tests.serving.models import Module
from tests.toys import QUIET

pytestmark = pytest.mark.slow

TOKENS = torch.arange(64).reshape(4, 16) % 96


class Exports(Callback):
    """Export on every rank to one folder, to a folder that exists, and on rank 0 alone."""

    def __init__(self, folder):
        self.folder = folder

    def on_fit_end(self, trainer, module):
        warnings.simplefilter("ignore")
        text = lightning_lowprec.export(module, f"{self.folder}/out", progress=False).text()
        whole = Path(f"{self.folder}/out/model.safetensors").is_file()
        with pytest.raises(ValueError, match="exists; expected a new folder"):
            lightning_lowprec.export(module, f"{self.folder}/out", progress=False)
        if trainer.is_global_zero:
            lightning_lowprec.export(module, f"{self.folder}/of rank 0", progress=False)
        Path(f"{self.folder}/{trainer.global_rank}.json").write_text(json.dumps([text, whole]))


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
def test_every_rank_of_ddp_may_export_and_rank_0_writes(tmp_path):
    """By processes to which the callbacks are pickled, as by ``ddp_spawn``; these are forked from one with imports."""
    server()
    data = torch.utils.data.DataLoader(TOKENS, batch_size=1)
    callbacks = [Exports(str(tmp_path))]
    options = {"precision": "fp8-rowwise", "devices": 2, "accelerator": "cpu", **QUIET}
    limits = {"max_epochs": 1, "limit_train_batches": 1, "num_sanity_val_steps": 0}
    strategy = DDPStrategy(start_method="forkserver")
    trainer = L.Trainer(**limits, callbacks=callbacks, strategy=strategy, **options)
    trainer.fit(Module(), data, data)
    assert trainer.callback_metrics["loss"].isfinite()
    (text, whole), other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert other == [text, whole]
    assert whole
    assert "the codes are those of the last step, bit for bit" in text
    ours, alone = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "of rank 0"))
    assert ours.keys() == alone.keys()
    assert not list(tmp_path.glob(".*"))
