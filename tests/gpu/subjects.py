"""What the GPU tests train, and the precisions that they train it in."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.doctor import availability
from tests import toys
from tests.gpu.device import DEVICE, NO_VALUES
from tests.representatives import representatives

WIDTH = 128


class Stack(toys.Stack):
    """Blocks of linears and a head; nothing in it is non-deterministic on a GPU."""

    def __init__(self, width: int = WIDTH, depth: int = 2) -> None:
        super().__init__(lambda: toys.Block(width), depth, head=("head", width, 16))


class Subject(L.LightningModule):
    """Fits random targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Stack()
        self.losses: list[float] = []
        self.predictions: list[Tensor] = []
        self.devices: set[str] = set()

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x).float(), y.float())  # bf16-true casts the batch

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.devices.add(next(self.parameters()).device.type)  # the Trainer moves the model to CPU after a fit
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def batches(count: int = 3, tokens: int = 48) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(tokens, WIDTH, generator=generator), torch.randn(tokens, 16, generator=generator))
        for _ in range(count)
    ]


def loader(count: int = 3, tokens: int = 48) -> DataLoader:
    return DataLoader(batches(count, tokens), batch_size=None)


def trainer(**options) -> L.Trainer:
    quiet = {
        "use_distributed_sampler": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options = {"enable_checkpointing": False, "accelerator": DEVICE.type, "devices": 1, **quiet, **options}
    return L.Trainer(**options)


def distinct() -> list[str]:
    """Every name of the table whose plugin or options differ from those before it; new names enter by themselves."""
    found: dict[str, str] = {}
    for name in representatives():
        entry = TABLE[name]
        found.setdefault(f"{entry.plugin.__name__} {sorted(entry.options.items())}", name)
    return list(found.values())


def runs_here(name: str) -> str | None:
    """Why a name cannot run on this machine (a missing library, another GPU's recipe), or None."""
    verdict = availability(name, DEVICE)
    return None if verdict.runs else verdict.reason


REHEARSED = ("half-auto", "bf16-8bit", "fp8-hybrid-fp16", "fp8-rowwise-gw-hp-sr", "fp8-hybrid-te", "fp8-current-te-sr")
"""Where nothing is computed these stand for all: tests/ledger/test_every_name.py trains each name there."""
NAMES = [name for name in distinct() if name in REHEARSED or not NO_VALUES]
FP8_NAMES = [name for name in NAMES if TABLE[name].plugin.__name__.startswith("FP8")]


def sqnr(reference: Tensor, value: Tensor) -> float:
    """Signal to noise in dB."""
    reference, value = reference.double().cpu(), value.double().cpu()
    noise = (reference - value).pow(2).sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(reference.pow(2).sum() / noise))
