"""What the tests of the plugin set up."""

import lightning as L
import torch
import transformer_engine.pytorch as te
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from lightning_lowprec.te.delayed_scaling import restore_scales
from tests.toys import Stack, Task, gelu_block

QUIET = {
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)


class Net(Stack):
    def __init__(self):
        super().__init__(gelu_block, 3, head=("lm_head", 32, 16), seed=0)


class Lit(Task):
    def __init__(self):
        super().__init__(Net())

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 16, 32), batch_size=2)


def te_linears(model):
    return [m for m in model.modules() if isinstance(m, te.Linear)]


def fabric_for(plugin):
    return L.Fabric(accelerator="cpu", devices=1, plugins=plugin)


def some_scales(length):
    generator = torch.Generator().manual_seed(length)
    return {
        f"{mode}.{name}": torch.rand(shape, generator=generator)
        for mode, count in (("forward", 3), ("backward", 2))
        for name, shape in (("scale", (count,)), ("amax_history", (length, count)))
    }


def give_scales(model, recipe, length=4):
    for number, layer in enumerate(te_linears(model)):
        entry = {key: value + number for key, value in some_scales(length).items()}
        restore_scales([("", layer)], {"": entry}, recipe)
