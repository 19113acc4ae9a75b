"""Real text that every machine has: the sources of Python's own standard library, as bytes."""

import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_lowprec.checks import check_integer

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})
EXCLUDED_FOLDERS |= {"encodings", "pydoc_data"}  # tables, not text
VAL_SHARE = 10  # one file in ten, and a tenth of max_bytes, is for validation
STDLIB = Path(sysconfig.get_paths()["stdlib"])

Batch = tuple[Tensor, Tensor]


class StdlibText(L.LightningDataModule):
    """Batches (x, y) of bytes from the standard library, less its tests and tables: (B, T) int64, y one byte ahead.

    Training and validation read different files, chosen by a hash of their paths. Training windows are drawn from
    ``seed``. Validation windows are evenly spaced and depend on the text alone, so every run validates on the same
    windows.

    Args:
        block_size: length T of a window.
        batch_size: windows in a batch.
        max_bytes: most bytes read for training; validation reads a tenth of that.
        train_windows: windows in an epoch of training.
        val_windows: windows of validation.
        seed: seed of the training windows.
    """

    def __init__(
        self,
        block_size: int = 128,
        batch_size: int = 8,
        max_bytes: int = 4_000_000,
        train_windows: int = 16_384,
        val_windows: int = 160,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.train_windows = train_windows
        self.val_windows = val_windows
        for name in ("block_size", "batch_size", "max_bytes", "train_windows", "val_windows"):
            check_integer(name, getattr(self, name), least=1)
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Read the text and choose the windows."""
        train_files, val_files = split(STDLIB)
        train = read(train_files, self.max_bytes, self.block_size)
        val = read(val_files, self.max_bytes // VAL_SHARE, self.block_size)
        starts = len(train) - self.block_size  # a window is block_size + 1 bytes
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(starts, (self.train_windows,), generator=generator)
        even = torch.arange(self.val_windows) * (len(val) - self.block_size) // self.val_windows
        self.train_set = Windows(train, drawn, self.block_size)
        self.val_set = Windows(val, even, self.block_size)

    def train_dataloader(self) -> "DataLoader[Batch]":
        """Return the windows in the order in which they were drawn, which is random already."""
        return DataLoader(self.train_set, batch_size=self.batch_size, num_workers=0, drop_last=True)

    def val_dataloader(self) -> "DataLoader[Batch]":
        """Return the fixed windows of validation."""
        return DataLoader(self.val_set, batch_size=self.batch_size, num_workers=0)


class Windows(Dataset[Batch]):
    """Windows of a text: item i is (x, y), int64 of length T, y one byte ahead of x."""

    def __init__(self, text: Tensor, starts: Tensor, block_size: int) -> None:
        self.text = text
        self.starts = starts
        self.block_size = block_size

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Batch:
        start = int(self.starts[index])
        window = self.text[start : start + self.block_size + 1].long()
        return window[:-1], window[1:]


def split(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the Python files for training and for validation, each in the order in which they are read."""
    names = [file.relative_to(folder) for file in folder.rglob("*.py") if file.is_file()]
    names = [name for name in names if EXCLUDED_FOLDERS.isdisjoint(name.parts)]
    ranked = [folder / name for name in sorted(names, key=lambda name: (zlib.crc32(str(name).encode()), name))]
    count = max(1, len(ranked) // VAL_SHARE)
    return ranked[count:], ranked[:count]


def read(files: Iterable[Path], max_bytes: int, block_size: int) -> Tensor:
    """Return the first ``max_bytes`` bytes of the files, one after the other: uint8 (N,), N > ``block_size``."""
    text = bytearray()
    for file in files:
        text += file.read_bytes()[: max_bytes - len(text)]
        if len(text) >= max_bytes:
            break
    if len(text) <= block_size:
        raise ValueError(
            f"the text has {len(text)!r} bytes; expected more than block_size={block_size}: pass a larger max_bytes or"
            " a smaller block_size."
        )
    return torch.frombuffer(text, dtype=torch.uint8)
