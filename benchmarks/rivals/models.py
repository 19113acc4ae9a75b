"""A Llama-shaped decoder in plain torch, its sizes, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec.losses import Options, computed

Loss = Literal["logits", "chunked", "fp8", "fp8 fast"]
"""All logits and torch's cross-entropy, or ours from hidden states, with a bf16 or FP8 head."""
ROPE_BASE = 500_000.0  # Llama 3's
INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of one decoder."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    sequence: int
    tied: bool = False
    """The output head shares the embedding's weight."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """heads x head_dim x layers, as ``planning.costs.flops`` wants it."""
        return self.hidden * self.layers

    @property
    def parameters(self) -> int:
        kv = self.kv_heads * self.head_dim
        block = 2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * block + (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden


TOY = Shape(name="toy", layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, vocab=256, sequence=32)
SHAPES = {
    "8b": Shape(
        name="8b", layers=16, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, sequence=4096
    ),  # half of Llama-3-8B's 32 layers: with float32 weights and AdamW all of it would not fit
    "1b": Shape(
        name="1b", layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, vocab=128256, sequence=4096, tied=True
    ),  # Llama-3.2-1B
    "memory": Shape(name="memory", layers=8, hidden=2048, ffn=8192, heads=32, kv_heads=8, vocab=32000, sequence=2048),
    "124m": Shape(
        name="124m", layers=12, hidden=768, ffn=2048, heads=12, kv_heads=12, vocab=50304, sequence=1024, tied=True
    ),  # the sizes of GPT-2 small; its vocabulary of 50257 filled up to a multiple of 64
    "toy": TOY,
}


def peak_bytes(shape: Shape, batch: int) -> int:
    """Most bytes of an eager bf16-mixed training step with AdamW, estimated from above.

    The two moments and the float32 weights stay. On top of them comes the larger of: the gradients (end of backward),
    or the activations, bf16 copies of the weights, and the logits in bf16 and float32 with their gradient (its start).
    """
    tokens = batch * shape.sequence
    kv = shape.kv_heads * shape.head_dim
    # residual stream and norms in float32 (x2 blocks), bf16 copies, q k v before and after rotation, attention, SwiGLU
    per_token = 4 * 4 * shape.hidden + 2 * (6 * shape.hidden + 3 * kv) + 2 * 4 * shape.ffn
    forward = shape.layers * tokens * per_token + 2 * shape.parameters + tokens * shape.vocab * (2 + 4 + 4 + 4)
    return 12 * shape.parameters + max(forward, 4 * shape.parameters)


def fitting(shape: Shape, device_bytes: int, batches: tuple[int, ...]) -> tuple[Shape, int]:
    """The shape and the largest batch whose step leaves a tenth of the device free.

    With half the layers if no batch fits all of them, so that 80 GB measure something of the 8B-shaped stack too; the
    smallest of all if nothing fits.
    """
    half = replace(shape, layers=shape.layers // 2)
    choices = [(which, batch) for which in (shape, half) for batch in batches]
    fits = (choice for choice in choices if peak_bytes(*choice) <= 0.9 * device_bytes)
    return next(fits, choices[-1])


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        kv = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """x: (B, T, hidden), turn: (2, T, head_dim / 2) -> (B, T, hidden)."""
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, hidden) -> the same shape."""
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """x: (B, T, hidden) -> the same shape."""
        x = x + self.attention(self.attention_norm(x), turn)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """The decoder; returns the loss, so that no wrapper casts 128k logits per token on its way out."""

    loss: Loss = "logits"

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embed.weight
        self.turn: Tensor
        self.register_buffer("turn", rotary(shape.sequence, shape.head_dim), persistent=False)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=INIT_STD)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: (B, T) int64 -> mean cross-entropy."""
        x = self.embed(tokens)
        turn = self.turn[:, : tokens.shape[1]]
        for block in self.layers:
            x = block(x, turn)
        if self.loss != "logits":
            hidden, head = self.norm(x), self.lm_head.weight
            fast = "all" if self.loss == "fp8 fast" else "forward"
            return computed(hidden, head, targets, None, Options(fp8=self.loss != "chunked", fast_accum=fast))
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rotary(length: int, features: int) -> Tensor:
    """Cosines and sines: (2, length, features / 2)."""
    frequency = ROPE_BASE ** (-torch.arange(0, features, 2) / features)
    angle = torch.arange(length)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """x: (..., T, D), turn: (2, T, D / 2) -> (..., T, D) in the dtype of x."""
    cos, sin = turn.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def build(shape: Shape, device: torch.device, seed: int = 0) -> Llama:
    """The model on its device, with the same weights for every contender."""
    torch.manual_seed(seed)
    with device:
        return Llama(shape)


def batches(shape: Shape, batch: int, device: torch.device, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """One data set for all: tokens with frequencies like words', targets the next token."""
    generator = torch.Generator().manual_seed(1)
    u = torch.rand(count, batch, shape.sequence + 1, generator=generator)
    tokens = (shape.vocab**u).long().clamp_(max=shape.vocab) - 1  # probability ~ 1 / rank
    return [(row[:, :-1].contiguous().to(device), row[:, 1:].contiguous().to(device)) for row in tokens]
