"""The texts, which every machine has: Python's standard library, and for the fine-tune torch's headers."""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from typing_extensions import override

from lightning_lowprec.tools.demo import STDLIB, VAL_SHARE, StdlibText, read, split, windows

MAX_BYTES = 4_000_000
"""Of training; validation reads a tenth of that."""


@cache
def headers() -> tuple[list[Path], list[Path]]:
    """Return torch's headers for training and for validation, by a hash of their paths, as ``split`` does."""
    folder = Path(torch.__file__).parent / "include"
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.h"))
    ranked = [folder / name for name in sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))]
    count = max(1, len(ranked) // VAL_SHARE)
    return ranked[count:], ranked[:count]


def parts(python: bool) -> tuple[Tensor, Tensor]:
    """Return the bytes for training and for validation: uint8 (N,) and (M,)."""
    train, val = split(STDLIB) if python else headers()
    return read(train, MAX_BYTES), read(val, MAX_BYTES // VAL_SHARE)


class HeaderText(StdlibText):
    """The batches of ``StdlibText`` from the headers."""

    @override
    def setup(self, stage: str) -> None:
        train, val = (windows(part, self.block_size) for part in parts(python=False))
        generator = torch.Generator().manual_seed(self.seed)
        drawn = train[torch.randint(len(train), (self.train_windows,), generator=generator)].long()
        even = val[torch.arange(self.val_windows) * len(val) // self.val_windows].long()
        self.train_set, self.val_set = (TensorDataset(cut[:, :-1], cut[:, 1:]) for cut in (drawn, even))
