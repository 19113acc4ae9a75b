"""Real text that every machine has: the sources of Python's own standard library, as bytes."""

import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})
EXCLUDED_FOLDERS |= {"encodings", "pydoc_data"}  # tables, not text
VAL_FILES_IN = 10  # one file in ten, and a tenth of max_bytes, is for validation
STDLIB = Path(sysconfig.get_paths()["stdlib"])

Batch = tuple[Tensor, Tensor]


class StdlibText(L.LightningDataModule):
    """Batches (x, y) of bytes, both (B, T) int64, y one byte ahead of x.

    Files, not windows, are split into training and validation, by a hash of their paths. Training windows are drawn
    from `seed`; validation windows are evenly spaced and depend on the text alone, so that every run is measured on the
    same ones.

    Args:
        root: Folder to read; the standard library (less its tests and tables) if neither `root` nor `files` is given.
        pattern: Files to read in the folder and below, e.g. `"*.txt"`.
        files: Text files to read instead of a folder.
        block_size: Length T of a window.
        batch_size: Windows in a batch.
        max_bytes: Most bytes read for training; validation reads a tenth of it.
        train_windows: Windows in an epoch of training.
        val_windows: Windows of validation.
        seed: Seed of the training windows.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        pattern: str = "*.py",
        files: Sequence[str | Path] | None = None,
        block_size: int = 128,
        batch_size: int = 8,
        max_bytes: int = 4_000_000,
        train_windows: int = 16_384,
        val_windows: int = 160,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if root is not None and files is not None:
            raise ValueError(f"got root={str(root)!r} and `files`; expected one of them, not both.")
        _check_sizes(block_size=block_size, batch_size=batch_size, max_bytes=max_bytes)
        _check_sizes(train_windows=train_windows, val_windows=val_windows)
        self.root = None if root is None else Path(root)
        self.pattern = pattern
        self.files = None if files is None else [Path(file) for file in files]
        self.block_size = block_size
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.train_windows = train_windows
        self.val_windows = val_windows
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Read the text and choose the windows."""
        train_files, val_files = self.split()
        train = _read(train_files, self.max_bytes, self.block_size, "training")
        val = _read(val_files, self.max_bytes // VAL_FILES_IN, self.block_size, "validation")
        starts = len(train) - self.block_size  # a window is block_size + 1 bytes
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(starts, (self.train_windows,), generator=generator)
        even = torch.arange(self.val_windows) * (len(val) - self.block_size) // self.val_windows
        self.train_set = Windows(train, drawn, self.block_size)
        self.val_set = Windows(val, even, self.block_size)

    def split(self) -> tuple[list[Path], list[Path]]:
        """The files for training and for validation, each in the order in which they are read."""
        files = self._find()
        if len(files) < 2:
            raise ValueError(
                f"found {len(files)!r} text files in {self._source()}; expected at least 2, because training and"
                " validation read different files: pass `root` (and `pattern`) or `files` with more text."
            )
        ranked = sorted(files, key=lambda file: (_hash(file, self.root or STDLIB), file.as_posix()))
        val_count = max(1, len(ranked) // VAL_FILES_IN)
        return ranked[val_count:], ranked[:val_count]

    def _find(self) -> list[Path]:
        if self.files is not None:
            return list(dict.fromkeys(self.files))
        root = self.root or STDLIB
        found = (file for file in sorted(root.rglob(self.pattern)) if file.is_file())
        if self.root is not None:
            return list(found)
        return [file for file in found if EXCLUDED_FOLDERS.isdisjoint(file.relative_to(root).parts)]

    def _source(self) -> str:
        return "`files`" if self.files is not None else f"{str(self.root or STDLIB)!r} (pattern={self.pattern!r})"

    def train_dataloader(self) -> "DataLoader[Batch]":
        """The windows in the order in which they were drawn, which is random already."""
        return DataLoader(self.train_set, batch_size=self.batch_size, num_workers=0, drop_last=True)

    def val_dataloader(self) -> "DataLoader[Batch]":
        """The fixed windows of validation."""
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


def _hash(file: Path, root: Path) -> int:
    relative = file.relative_to(root) if file.is_relative_to(root) else file
    return zlib.crc32(relative.as_posix().encode())


def _read(files: Iterable[Path], max_bytes: int, block_size: int, purpose: str) -> Tensor:
    """The first `max_bytes` bytes of the files, one after the other: uint8 (N,), N > block_size."""
    text = bytearray()
    for file in files:
        text += file.read_bytes()[: max_bytes - len(text)]
        if len(text) >= max_bytes:
            break
    if len(text) <= block_size:
        raise ValueError(
            f"the text for {purpose} has {len(text)!r} bytes; expected more than block_size={block_size}:"
            " pass more text, a larger max_bytes or a smaller block_size."
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"`{name}={value!r}` is not valid; expected an integer of at least 1.")
