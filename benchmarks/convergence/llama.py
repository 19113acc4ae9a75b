"""A small Llama of transformers on bytes, trained from random weights, or by LoRA adapters on trained weights."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.convergence.optimizer import adamw
from lightning_lowprec.tools.demo.model import VOCAB_SIZE

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers that get adapters: every Linear of a block."""


def random_llama(depth: int, width: int, heads: int, block_size: int) -> LlamaForCausalLM:
    """Return a Llama with random weights, one token per byte, grouped queries, and an untied output head."""
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
    """A small Llama that predicts the next byte.

    Args:
        depth: number of decoder layers.
        width: width of the residual stream; a multiple of 16.
        heads: number of heads of the queries; keys and values have half as many.
        block_size: length of a window in bytes.
        lr: AdamW's largest learning rate.
        steps: optimizer steps of the run, at whose end the learning rate is zero.
    """

    def __init__(
        self, depth: int = 2, width: int = 64, heads: int = 4, block_size: int = 64, lr: float = 1e-3, steps: int = 100
    ) -> None:
        super().__init__()
        self.lr = lr
        self.steps = steps
        self.llama: PreTrainedModel = random_llama(depth, width, heads, block_size)

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
    """The same Llama with trained, frozen weights, and adapters of PEFT on every Linear of its blocks.

    Args:
        base: file with the trained weights, as ``torch.save`` wrote them.
        rank: rank of the adapters.
        sizes: the arguments of :class:`ByteLlama`.
    """

    def __init__(self, base: str, rank: int = 8, **sizes: float) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__(**sizes)
        self.llama.load_state_dict(torch.load(Path(base), weights_only=True))
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), lora_dropout=0.0)
        self.llama = get_peft_model(self.llama, config)
