"""Real text that every machine has: the sources of Python's own standard library, as bytes."""

import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})
EXCLUDED_FOLDERS |= {"encodings", "pydoc_data"}  # tables, not text
VAL_SHARE = 10  # one file in ten, and a tenth of max_bytes, is for validation
STDLIB = Path(sysconfig.get_paths()["stdlib"])

Batch = tuple[Tensor, ...]


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
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Read the text and cut the windows."""
        train_files, val_files = split(STDLIB)
        train = windows(read(train_files, self.max_bytes), self.block_size)
        val = windows(read(val_files, self.max_bytes // VAL_SHARE), self.block_size)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(len(train), (self.train_windows,), generator=generator)
        even = torch.arange(self.val_windows) * len(val) // self.val_windows
        self.train_set, self.val_set = _pairs(train[drawn].long()), _pairs(val[even].long())

    def train_dataloader(self) -> "DataLoader[Batch]":
        """Return the windows in the order in which they were drawn, which is random already."""
        return DataLoader(self.train_set, batch_size=self.batch_size, num_workers=0, drop_last=True)

    def val_dataloader(self) -> "DataLoader[Batch]":
        """Return the fixed windows of validation."""
        return DataLoader(self.val_set, batch_size=self.batch_size, num_workers=0)


def split(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the Python files for training and for validation, each in the order in which they are read."""
    names = [file.relative_to(folder) for file in _sources(folder)]
    ranked = [folder / name for name in sorted(names, key=lambda name: (zlib.crc32(str(name).encode()), name))]
    count = max(1, len(ranked) // VAL_SHARE)
    return ranked[count:], ranked[:count]


def _sources(folder: Path) -> Iterator[Path]:
    """Yield the Python files below ``folder``, without a look into the excluded folders: they hold most files."""
    for parent, folders, files in os.walk(folder):
        folders[:] = set(folders) - EXCLUDED_FOLDERS
        yield from (path for file in files if (path := Path(parent, file)).suffix == ".py" and path.is_file())


def read(files: Iterable[Path], max_bytes: int) -> Tensor:
    """Return the first ``max_bytes`` bytes of the files, one after the other: uint8 (N,)."""
    text = bytearray()
    for file in files:
        text += file.read_bytes()[: max_bytes - len(text)]
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def windows(text: Tensor, block_size: int) -> Tensor:
    """Return every window of a text, as a view: (N,) -> (N - block_size, block_size + 1)."""
    return text.unfold(0, block_size + 1, 1)


def _pairs(windows: Tensor) -> TensorDataset:
    return TensorDataset(windows[:, :-1], windows[:, 1:])
