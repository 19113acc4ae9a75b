"""A small vision transformer of transformers, which reads rendered digits."""

from __future__ import annotations

import lightning as L
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.convergence.digits import CLASSES, SIDE
from benchmarks.convergence.optimizer import adamw


class DigitViT(L.LightningModule):
    """A ViT with one class token, trained from random weights.

    Args:
        depth: number of blocks.
        width: width of the residual stream; a multiple of 16.
        heads: number of attention heads.
        patch: side of a patch in pixels; divides the side of an image.
        lr: AdamW's largest learning rate.
        steps: optimizer steps of the run, at whose end the learning rate is zero.
    """

    def __init__(
        self, depth: int = 2, width: int = 64, heads: int = 4, patch: int = 4, lr: float = 1e-3, steps: int = 100
    ) -> None:
        super().__init__()
        self.lr = lr
        self.steps = steps
        config = ViTConfig(
            image_size=SIDE,
            patch_size=patch,
            num_channels=1,
            num_labels=CLASSES,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.05,
        )
        self.vit = ViTForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        """images: (B, 1, 28, 28) float32 -> logits (B, 10)."""
        logits: Tensor = self.vit(pixel_values=images).logits
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """batch: images (B, 1, 28, 28) and classes (B,) -> mean cross-entropy in nats per image."""
        images, classes = batch
        return F.cross_entropy(self(images).float(), classes)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss``, in nats per image, and ``val_accuracy``."""
        images, classes = batch
        logits = self(images).float()
        self.log("val_loss", F.cross_entropy(logits, classes))
        self.log("val_accuracy", (logits.argmax(-1) == classes).float().mean())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW over all parameters."""
        return adamw(self.parameters(), self.lr, self.steps)
