"""What the tests of the plugin set up."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from lightning_lowprec.te.delayed_scaling import restore_scales
from lightning_lowprec.te.layer import te_linears
from tests.te.test_te_layers import some_scales

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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        make = lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))  # noqa: E731
        self.blocks = nn.ModuleList(make() for _ in range(3))
        self.lm_head = nn.Linear(32, 16)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(x)


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 16, 32), batch_size=2)


def fabric_for(plugin):
    return L.Fabric(accelerator="cpu", devices=1, plugins=plugin)


def give_scales(model, recipe, length=4):
    for number, layer in enumerate(te_linears(model)):
        entry = {key: value + number for key, value in some_scales(length).items()}
        restore_scales([("", layer)], {"": entry}, recipe)
