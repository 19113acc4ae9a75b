"""The models of the experiment, with one optimizer: AdamW, whose learning rate rises shortly and then falls to zero.

With a constant learning rate the last loss would jump from step to step, and differ between two runs by luck.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.evidence.digits import CLASSES, SIDE
from lightning_lowprec.tools.demo import VOCAB_SIZE, WARMUP_STEPS, ByteGPT

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers that get adapters: every Linear of a block."""


def adamw(parameters: Iterable[nn.Parameter], lr: float, steps: int) -> OptimizerLRScheduler:
    """Return AdamW over the parameters that train, and its schedule, as ``configure_optimizers`` returns them."""
    optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(share, steps=steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def share(step: int, steps: int) -> float:
    """Return the share of the learning rate before step ``step`` of ``steps``, counted from 0: a triangle."""
    warmup = min(WARMUP_STEPS, steps // 2)
    return min((step + 1) / (warmup + 1), (steps - step) / (steps - warmup))


def know_names() -> None:
    """Make the names with ``@`` known to the process that trains."""
    from benchmarks.evidence import devices  # noqa: F401


class DecayedGPT(ByteGPT):
    """The GPT of ``lowprec compare``."""

    def __init__(self, steps: int, **sizes: float) -> None:
        know_names()
        super().__init__(**sizes)
        self.steps = steps

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return adamw(self.parameters(), self.lr, self.steps)


def random_llama(depth: int, width: int, heads: int, block_size: int) -> Any:
    """Return a Llama of transformers with random weights: one token per byte, grouped queries, an untied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    know_names()
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=block_size,
        initializer_range=0.05,  # as in ByteGPT: 0.02 goes with much larger widths
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class ByteLlama(L.LightningModule):
    """A small Llama that predicts the next byte."""

    def __init__(
        self, depth: int = 2, width: int = 64, heads: int = 4, block_size: int = 64, lr: float = 1e-3, steps: int = 100
    ) -> None:
        super().__init__()
        self.lr = lr
        self.steps = steps
        self.llama = random_llama(depth, width, heads, block_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (B, T) int64 -> logits (B, T, 256)."""
        logits: Tensor = self.llama(input_ids=tokens).logits
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """batch: (x, y), both (B, T) int64 -> mean cross-entropy in nats per byte."""
        return self._loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss``, in nats per byte."""
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW over what trains."""
        return adamw(self.parameters(), self.lr, self.steps)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).float().flatten(0, 1), y.flatten())


class LoraLlama(ByteLlama):
    """The same Llama with trained, frozen weights, and adapters of PEFT on every Linear of its blocks."""

    def __init__(self, base: str, seed: int, rank: int = 8, **sizes: float) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__(**sizes)
        self.llama.load_state_dict(torch.load(Path(base, f"base-{seed}.pt"), weights_only=True))
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), lora_dropout=0.0)
        self.llama = get_peft_model(self.llama, config)


class DigitViT(L.LightningModule):
    """A ViT with one class token, trained from random weights."""

    def __init__(
        self, depth: int = 2, width: int = 64, heads: int = 4, patch: int = 4, lr: float = 1e-3, steps: int = 100
    ) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        know_names()
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
