"""The default model and text of ``lowprec compare``: a small byte-level GPT, and the sources of the standard library.

The dimensions of every Linear are multiples of 16, so FP8 converts every Linear except the output head.

Rotary positions, a short warm-up and a modest learning rate make the model a fair subject for a comparison. Without
them the loss stays on the plateau of the bigram loss for a hundred steps. Any rounding moves the step at which the loss
leaves the plateau, and then the final losses of two precisions differ by luck.
"""

import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowprec.messages import info
from lightning_lowprec.private.either import LightningDataModule, LightningModule, OptimizerLRScheduler

__all__ = ["ByteGPT", "StdlibText"]
VOCAB_SIZE = 256  # one token per byte
INIT_STD = 0.05  # GPT-2's 0.02 goes with a width of 768; the narrower, the larger
ROPE_BASE = 1000.0  # longest wavelength in bytes / 2 pi; well above any block_size of this model's size
WARMUP_STEPS = 20
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})
EXCLUDED_FOLDERS |= {"encodings", "pydoc_data"}  # tables, not text
VAL_SHARE = 10  # one file in ten, and a tenth of max_bytes, is for validation
STDLIB = Path(sysconfig.get_paths()["stdlib"])
NEXT = (
    "Next, with a model of your own: `lowprec plan my.Model` shows which layers convert, and"
    " `lowprec compare --model my.Model --data my.Data` whether a precision costs loss."
)

Batch = tuple[Tensor, ...]


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn each pair of features by an angle that grows with the position: rotary positions (arXiv 2104.09864).

    x: (..., T, D), turn: cosines and sines (2, T, D / 2) -> (..., T, D) in the dtype of x.
    """
    cos, sin = turn.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """One pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.fc_in = nn.Linear(width, 4 * width)
        self.fc_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """x: (B, T, width), turn: (2, T, width / heads / 2) -> (B, T, width)."""
        qkv = self.qkv(self.attn_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, width / heads)
        y = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        mlp: Tensor = self.fc_out(F.gelu(self.fc_in(self.mlp_norm(x))))
        return x + mlp


class ByteGPT(LightningModule):
    """A byte-level GPT with rotary positions and an untied output head.

    Args:
        depth: number of transformer blocks.
        width: width of the residual stream; a multiple of 16 and of 2 * ``heads``.
        heads: number of attention heads.
        block_size: longest sequence, in bytes.
        lr: AdamW's learning rate.
    """

    def __init__(
        self, depth: int = 4, width: int = 128, heads: int = 4, block_size: int = 128, lr: float = 1e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.block_size = block_size
        self.lr = lr
        self.token_embedding = nn.Embedding(VOCAB_SIZE, width)
        self.turn: Tensor
        self.register_buffer("turn", _turn(block_size, width // heads), persistent=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCAB_SIZE, bias=False)
        self._init_weights(depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (B, T) int64, T <= block_size -> logits (B, T, 256)."""
        x = self.token_embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turn[:, : tokens.shape[-1]])
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """batch: (x, y), both (B, T) int64 -> mean cross-entropy in nats per byte."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss``, in nats per byte."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def on_fit_end(self) -> None:
        """Say what to do next."""
        info(NEXT)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW over all parameters, with a short linear warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.01)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        logits = self(x).float()  # softmax over half precision logits would lose digits in any precision
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    @torch.no_grad()
    def _init_weights(self, depth: int) -> None:
        for fqn, parameter in self.named_parameters():
            if fqn.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=INIT_STD)
            if fqn.endswith(("proj.weight", "fc_out.weight")):  # GPT-2: the residual stream must not grow with depth
                parameter.mul_((2 * depth) ** -0.5)
        nn.init.normal_(self.lm_head.weight, std=0.02)  # small logits: the first loss is ln 256


def _turn(length: int, features: int) -> Tensor:
    frequency = ROPE_BASE ** (-torch.arange(0, features, 2) / features)
    angle = torch.arange(length)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()])


# ---- the text


class StdlibText(LightningDataModule):
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
    count = len(ranked) // VAL_SHARE
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
