"""A byte-level GPT, small enough to train on two CPU cores in under a minute.

The dimensions of every Linear are multiples of 16, so FP8 converts every Linear except the output head.

Rotary positions, a short warm-up and a modest learning rate make the model a fair subject for ``lowprec compare``.
Without them the loss stays on the plateau of the bigram loss for a hundred steps. Any rounding moves the step at which
the loss leaves the plateau, and then the final losses of two precisions differ by luck.
"""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

VOCAB_SIZE = 256  # one token per byte
INIT_STD = 0.05  # GPT-2's 0.02 goes with a width of 768; the narrower, the larger
ROPE_BASE = 1000.0  # longest wavelength in bytes / 2 pi; well above any block_size of this model's size
WARMUP_STEPS = 20


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


class ByteGPT(L.LightningModule):
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
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss``, in nats per byte."""
        self.log("val_loss", self._loss(batch))

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
