"""How often the host waits for the GPU while a Trainer trains a Llama of transformers, called as users call it."""

import gc
from contextlib import ExitStack

import lightning as L
import peft
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ledger.recorder import recording
from tests.ledger.budgets import WAITS
from tests.ledger.test_trainer import compiles
from tests.representatives import TABLE

WORDS, BATCHES = 256, 8
BY_INDUCTOR = {"fp8-hybrid"}
"""Blocks of other names are traced only: what the host waits for is in Python, not in a kernel."""
REHEARSED = {"fp8-block", "int8-mixed", "msamp-o2"}
"""Their kernels take a minute or two to compile."""
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}


class Task(L.LightningModule):
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


def precision(case):
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
        accelerator="cuda", devices=1, max_epochs=1, callbacks=[step], default_root_dir=tmp_path, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **precision(case),
        accumulate_grad_batches=2, gradient_clip_val=1.0,
    )  # fmt: skip
    task = Task(checkpoints="checkpoints" in case, adapters="LoRA" in case)
    trainer.fit(task, DataLoader(torch.randint(WORDS, (2 * BATCHES, 64)), batch_size=2))
    assert step.log.count("kernel") > 100
    waits = [record.name for record in step.log.waits()]
    assert waits == ["D2H", "cudaStreamSynchronize"] * WAITS[case]
