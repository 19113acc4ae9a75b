"""Windows of the text as batches."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.convergence.corpus import Span
from benchmarks.convergence.digits import VAL_BATCH
from lightning_lowprec.tools.demo.data import Batch, windows


class TextWindows(L.LightningDataModule):
    """Batches (x, y) of bytes: (B, T) int64, y one byte ahead.

    Training windows are drawn from ``seed``. Validation windows are evenly spaced, so every run validates on the same.

    Args:
        path: file with the text, which is mapped into memory: only what the windows hold is read.
        train: the bytes for training, from the first to behind the last.
        val: the bytes for validation.
        block_size: length T of a window.
        batch_size: windows in a batch.
        train_windows: windows in an epoch of training.
        val_windows: windows of validation.
        seed: seed of the training windows.
    """

    def __init__(
        self,
        path: str,
        train: Span,
        val: Span,
        block_size: int = 64,
        batch_size: int = 8,
        train_windows: int = 2048,
        val_windows: int = 128,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.path = path
        self.spans = {"train": train, "val": val}
        self.block_size = block_size
        self.batch_size = batch_size
        self.train_windows = train_windows
        self.val_windows = val_windows
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Cut the windows."""
        train, val = self._windows("train"), self._windows("val")
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(len(train), (self.train_windows,), generator=generator)
        even = torch.arange(self.val_windows) * len(val) // self.val_windows
        self.train_set, self.val_set = _pairs(train[drawn].long()), _pairs(val[even].long())

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the windows in the order in which they were drawn, which is random already."""
        return DataLoader(self.train_set, batch_size=self.batch_size, num_workers=0, drop_last=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the fixed windows of validation."""
        return DataLoader(self.val_set, batch_size=VAL_BATCH * self.batch_size, num_workers=0)

    def _windows(self, part: str) -> Tensor:
        first, end = self.spans[part]
        text = torch.from_file(self.path, shared=False, size=end, dtype=torch.uint8)
        return windows(text[first:], self.block_size)


def _pairs(cut: Tensor) -> TensorDataset:
    return TensorDataset(cut[:, :-1], cut[:, 1:])
