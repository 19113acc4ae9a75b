"""Pictures of the digits 0 to 9, rendered with matplotlib's fonts: moved, turned, scaled and noisy."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import lightning as L
import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10
SIDE = 28
"""Pixels of a side of a picture."""
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic",
)  # fmt: skip
"""Fonts of matplotlib that have the ten digits."""
SIZES = (20, 23)  # of a font, in pixels
TURN = 8.0  # degrees, at most, to either side
MOVE = 1  # pixels, at most, in each direction
NOISE = 0.1  # standard deviation; a digit is 1 on 0
VAL_BATCH = 8
"""A batch of validation has so many times the pictures of one of training: a forward alone needs less memory."""
VAL_SEED = 1_000_003  # no seed of training pictures

Batch = tuple[Tensor, ...]


def fonts() -> list[Path]:
    """Return the font files.

    Raises:
        FileNotFoundError: the installed matplotlib lacks one.
    """
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    found = [folder / f"{name}.ttf" for name in FONTS]
    if missing := [path.name for path in found if not path.is_file()]:
        raise FileNotFoundError(f"matplotlib {matplotlib.__version__} has no fonts {missing} in {folder}.")
    return found


@cache
def _font(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), size)


def digit(number: int, font: ImageFont.FreeTypeFont, turn: float, dx: int, dy: int) -> Image.Image:
    """Return a grey picture of one digit, white on black: in the middle, then turned and moved."""
    picture = Image.new("L", (SIDE, SIDE))
    ImageDraw.Draw(picture).text((SIDE / 2, SIDE / 2), str(number), fill=255, font=font, anchor="mm")
    return picture.rotate(turn, resample=Image.Resampling.BILINEAR, translate=(dx, dy))


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random pictures and their classes: (count, 1, 28, 28) float32 and (count,) int64."""
    random = np.random.default_rng(seed)
    numbers = random.integers(CLASSES, size=count)
    files = fonts()
    drawn = np.empty((count, 1, SIDE, SIDE), dtype=np.float32)
    for i, number in enumerate(numbers):
        font = _font(files[random.integers(len(files))], SIZES[random.integers(len(SIZES))])
        dx, dy = random.integers(-MOVE, MOVE + 1, size=2)
        drawn[i, 0] = np.asarray(digit(number, font, random.uniform(-TURN, TURN), int(dx), int(dy))) / np.float32(255)
    drawn += NOISE * random.standard_normal(drawn.shape, dtype=np.float32)
    return torch.from_numpy(drawn), torch.from_numpy(numbers)


class Digits(L.LightningDataModule):
    """Batches of pictures and classes. Training pictures depend on ``seed``; those of validation never change."""

    def __init__(
        self, batch_size: int = 32, train_pictures: int = 4096, val_pictures: int = 512, seed: int = 0
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.train_pictures = train_pictures
        self.val_pictures = val_pictures
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Render the pictures."""
        self.train_set = TensorDataset(*pictures(self.train_pictures, self.seed))
        self.val_set = TensorDataset(*pictures(self.val_pictures, VAL_SEED))

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the pictures in the order in which they were drawn, which is random already."""
        return DataLoader(self.train_set, batch_size=self.batch_size, num_workers=0, drop_last=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the fixed pictures of validation."""
        return DataLoader(self.val_set, batch_size=VAL_BATCH * self.batch_size, num_workers=0)
