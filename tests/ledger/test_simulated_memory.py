"""The peak of `lowprec plan --fits`, against torch's own allocator while Trainer and Fabric train on the null GPU."""

import copy
import gc
from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from lightning_lowprec.private.transformers import as_with_values
from lightning_lowprec.tools.fits.simulation import Setting, Simulator, inputs_of
from tests.toys import QUIET

BATCH, TOKENS, WIDTH = 2, 2048, 1024
LLAMA = LlamaConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=16,
    num_key_value_heads=4,
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=50257, n_positions=TOKENS, n_embd=1024, n_layer=6, n_head=16)


class Trained(L.LightningModule):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=self.fused or None)


class LanguageModel(Trained):
    def __init__(self, config, fused=True, checkpointing=False):
        super().__init__(fused)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def training_step(self, batch, index):
        return self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss


class Regressor(Trained):
    def __init__(self, fused=True):
        super().__init__(fused)
        layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.head(self.encoder(batch[0])), batch[1])


def tokens():
    return (torch.zeros(BATCH, TOKENS, dtype=torch.long),)


def rows():
    return torch.zeros(BATCH, TOKENS, WIDTH), torch.zeros(BATCH, TOKENS, 1)


class Peaks(L.Callback):
    def on_train_start(self, trainer, module):
        torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, trainer, module):
        self.found = torch.cuda.max_memory_allocated()


def free():
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # a run makes its own, which are a part of its peak
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def by_trainer(module, precision, batch, folder):
    peaks = Peaks()
    data = DataLoader(TensorDataset(*(t.repeat(3, *[1] * (t.ndim - 1)) for t in batch)), batch_size=len(batch[0]))
    trainer = L.Trainer(
        accelerator="cuda", devices=1, precision=precision, max_epochs=1, callbacks=[peaks], default_root_dir=folder,
        **QUIET,
    )  # fmt: skip
    with as_with_values():  # the null GPU shows zeros, which would say that sequences are packed
        trainer.fit(module, data)
    return peaks.found


def by_fabric(module, precision, batch, folder):
    fabric = L.Fabric(accelerator="cuda", devices=1, precision=precision)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), fused=True))
    model.mark_forward_method("training_step")
    batch = fabric.to_device(batch)
    torch.cuda.reset_peak_memory_stats()
    with as_with_values():
        for _ in range(2):
            loss = model.training_step(batch, 0)
            optimizer.zero_grad()
            fabric.backward(loss)
            del loss
            optimizer.step()
    return torch.cuda.max_memory_allocated()


def on_meta(make):
    with torch.device("meta"):
        return make()


def on_gpu(model):
    model = model.to_empty(device="cuda")
    if hasattr(model, "model"):
        model.model.tie_weights()  # `to_empty` makes two weights of one
    return model


CHECKPOINTED = partial(LanguageModel, LLAMA, checkpointing=True)
CASES = {
    "llama, bf16-mixed, foreach": (partial(LanguageModel, LLAMA, fused=False), tokens, "bf16-mixed", by_trainer, False),
    "llama, bf16-remainder": (partial(LanguageModel, LLAMA), tokens, "bf16-remainder", by_trainer, True),
    "llama, fp8-hybrid, checkpointing": (CHECKPOINTED, tokens, "fp8-hybrid", by_trainer, True),
    "gpt2, bf16-master": (partial(LanguageModel, GPT2), tokens, "bf16-master", by_trainer, True),
    "encoder, 32-true, Fabric": (Regressor, rows, "32-true", by_fabric, True),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_simulated_peak_is_that_of_the_allocator(case, tmp_path):
    make, batch, precision, train, fused = CASES[case]
    setting = Setting(precision=precision, batch=len(batch()[0]), fused=fused)
    model = on_meta(make)
    peaks = Simulator(copy.deepcopy(model), inputs_of(model, batch())).peaks(setting)
    simulated = max(sum(peak.values()) for peak in peaks.values())
    before = free()
    model = on_gpu(model)
    real = train(model, precision, batch(), tmp_path) - before
    print(f"{case}: simulated {simulated / 1e9:.2f} GB, allocator {real / 1e9:.2f} GB, {simulated / real - 1:+.2%}")
    assert simulated == pytest.approx(real, rel=0.05)
