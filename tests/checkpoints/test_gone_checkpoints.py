"""A checkpoint that was written under a word that has left loads under the word to write instead, with exact masters.

``gone/NAME.ckpt`` is a Trainer's checkpoint after three steps, written by the last commit that had the word;
``gone/NAME.expected.pt`` has the float32 weights that ``fit`` left in the model at that commit.

The word ``msamp-o3`` has stayed; its masters have left the state of the optimizer (they are the weights).
``mxfp8-te`` was trained by the real Transformer Engine, whose name ``mxfp8`` was where it was installed: on CPU, with
quantizers in plain torch (e4m3, a power-of-two scale per 32 values), and with torch's LayerNorm.
"""

from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from tests import entry_points  # noqa: F401  # the names
from tests.toys import ON_CPU

FOLDER = Path(__file__).with_name("gone")
INSTEAD = {
    "bf16-lean": ["bf16-8bit", "bf16-remainder"],
    "bf16-lean-sr": ["bf16-sr"],
    "fp8-lean": ["fp8-hybrid-8bit"],
    "remainder8": ["bf16-8bit"],
    "nvfp4-torchao": ["fp8-hybrid"],
    "fp8-hybrid-master": ["fp8-hybrid-remainder"],
    "int8-mixed-fp16": ["int8-mixed"],
    "fp8-e4m3-fp16": ["fp8-e4m3"],
    "fp8-tensorwise": ["fp8-hybrid"],
    "mxfp8-te": ["mxfp8"],
    "mxfp8-torchao": ["mxfp8"],
    "schedule": ["fp8-hybrid"],
    "msamp-o3": ["msamp-o3", "msamp-o1", "bf16-remainder", "32-true"],
}
"""For each file, the words under which a run goes on."""


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x))))

    def training_step(self, batch, _):
        return (self(batch) - batch[:, :16].flip(1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        torch.manual_seed(2)
        return torch.utils.data.DataLoader(torch.randn(48, 64), batch_size=16)


def go_on(name, precision, steps):
    model = Model()
    trainer = L.Trainer(max_steps=steps, max_epochs=-1, precision=precision, **ON_CPU)
    trainer.fit(model, ckpt_path=FOLDER / f"{name}.ckpt")
    assert trainer.global_step == steps
    return model


@pytest.mark.parametrize(("name", "precision"), [(name, word) for name, words in INSTEAD.items() for word in words])
def test_values_are_those_of_then(name, precision):
    expected = torch.load(FOLDER / f"{name}.expected.pt", weights_only=True)
    loaded = go_on(name, precision, steps=3).state_dict()
    assert loaded.keys() == expected.keys()
    for key, value in expected.items():
        assert value.dtype == loaded[key].dtype == torch.float32
        assert torch.equal(loaded[key], value), key
    moved = go_on(name, precision, steps=4)
    step = (moved.up.weight.detach() - expected["up.weight"]).abs().max()
    assert 1e-4 < step < 5e-3  # AdamW moves a weight by about its learning rate, 1e-3
