"""What users do around a step runs on CUDA tensors to its end: control flow, not values."""

import gc
import inspect
from contextlib import ExitStack
from functools import partial

import lightning as L
import peft
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ledger.recorder import recording
from tests.ledger.budgets import WAITS
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


# ---- how often the host waits for the GPU in a step of a Llama


WORDS, BATCHES = 256, 8
BY_INDUCTOR = {"fp8-hybrid"}
"""Blocks of other names are traced only: what the host waits for is in Python, not in a kernel."""
REHEARSED = {"fp8-block", "int8-mixed", "msamp-o2"}
"""Their kernels take a minute or two to compile."""
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}


class LanguageModel(L.LightningModule):
    def __init__(self, *, checkpoints=False, adapters=False):
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **SIZES))
        if checkpoints:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if adapters:
            chosen = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            self.model = peft.get_peft_model(self.model, chosen)

    def training_step(self, batch, index):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad])


class LastStep(L.Callback):
    def __init__(self):
        self.stack = ExitStack()

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == BATCHES - 2:
            self.log = self.stack.enter_context(recording())

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index == BATCHES - 1:
            self.stack.close()


def precision_of(case):
    name, _, option = case.partition(", ")
    if name not in TABLE:
        return {"precision": name}
    row = TABLE[name]
    chosen = {"skip_nonfinite": True} if option.startswith("skip") else {}
    if compiles(name) and case not in BY_INDUCTOR:
        chosen["compile"] = {"backend": "eager"}
    return {"plugins": row.plugin(**row.options, **chosen)}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.rehearsed if case in REHEARSED else ()) for case in WAITS]
)
def test_a_step_waits_no_oftener_than_its_budget(case, tmp_path):
    torch._dynamo.reset()
    gc.collect()
    step = LastStep()
    trainer = L.Trainer(
        accelerator="cuda", devices=1, max_epochs=1, callbacks=[step], default_root_dir=tmp_path,
        accumulate_grad_batches=2, gradient_clip_val=1.0, **QUIET, **precision_of(case),
    )  # fmt: skip
    task = LanguageModel(checkpoints="checkpoints" in case, adapters="LoRA" in case)
    trainer.fit(task, DataLoader(torch.randint(WORDS, (2 * BATCHES, 64)), batch_size=2))
    assert step.log.count("kernel") > 100
    waits = [record.name for record in step.log.waits()]
    assert waits == ["D2H", "cudaStreamSynchronize"] * WAITS[case]
