"""What users do around a step runs on CUDA tensors to its end: control flow, not values."""

import inspect
from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.representatives import TABLE, representatives
from tests.toys import QUIET, Block, Stack, Task

NAMES = sorted({*representatives()} - {"fp8-e4m3", "mxfp8-te", "nvfp4-te", "mxfp8"})
"""Each plugin, recipe and base dtype once."""
COMPILED = {"fp8-hybrid", "fp8-rowwise-remainder", "fp8-block", "int8-mixed", "msamp-o2"}
"""Each backend, scales per tensor and per row, and masters once with compiled blocks."""
WIDTH, CLASSES = 32, 16


class Classifier(Task):
    def __init__(self, checkpointing=False):
        super().__init__(Stack(lambda: Block(WIDTH), head=("head", WIDTH, CLASSES)), self.of_logits)
        if checkpointing:
            for block in self.net.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def of_logits(self, net, batch):
        return F.cross_entropy(net(batch[0]).float(), batch[1])

    def validation_step(self, batch, index):
        self.log("loss", self.loss(self.net, batch))

    test_step = validation_step

    def predict_step(self, batch, index):
        return self.net(batch[0]).argmax(-1)


def loader(batches=4, rows=16):
    data = TensorDataset(torch.randn(batches * rows, WIDTH), torch.randint(CLASSES, (batches * rows,)))
    return DataLoader(data, batch_size=rows)


def precision(name, compiled):
    row = TABLE[name]
    return {"precision": name} if compiled is True else {"plugins": row.plugin(**row.options, compile=compiled)}


def compiles(name):
    return "compile" in inspect.signature(TABLE[name].plugin).parameters


def each_once():
    """(name, whether its default is left): the blocks of most names are compiled in `make rehearse` only."""
    for name in NAMES:
        if not compiles(name) or name in COMPILED:
            yield pytest.param(name, True, id=name)
        else:
            yield pytest.param(name, False, id=f"{name}, eager")
            yield pytest.param(name, True, id=name, marks=pytest.mark.rehearsed)


def trainer(name, folder, compiled=True, **options):
    quiet = {**QUIET, "enable_checkpointing": True}
    return L.Trainer(
        accelerator="cuda", devices=1, **precision(name, compiled), default_root_dir=folder, **quiet, **options
    )


@pytest.mark.parametrize(("name", "compiled"), list(each_once()))
def test_fit_evaluate_save_and_resume(name, compiled, tmp_path):
    plugin = TABLE[name].plugin.__name__
    delayed = plugin == "FP8TE" and TABLE[name].options["recipe"] == "delayed"
    model = Classifier(checkpointing=not delayed and plugin != "MSAMP")
    first = trainer(name, tmp_path, compiled, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=1.0)
    first.fit(model, loader(), loader())
    assert (len(model.losses), first.global_step) == (8, 4)
    first.validate(model, loader())
    first.test(model, loader())
    answers = first.predict(model, loader())
    assert [a.shape for a in answers] == [(16,)] * 4
    first.save_checkpoint(tmp_path / "last.ckpt")
    again = Classifier()
    second = trainer(name, tmp_path, compiled, max_epochs=3)
    second.fit(again, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert (len(again.losses), second.global_step) == (4, 8)
    assert {p.device.type for p in again.parameters()} == {"cpu"}  # as the Trainer leaves any model
