"""What an update during the backward pass may do in the place of clipping and of accumulation: losses of a small GPT.

    python -m benchmarks.backward_updates clipping --steps 300 --seeds 3

Bytes of docs/*.md, float32, plain loops of torch without this package, so that nothing but the rule differs.
``clipping`` trains with 2 % bad batches (random targets, the loss times 30), and clips to norm 1 by the norm of all
gradients (exact), by the norm of the last step (last), by the larger one of this and of the norm of the gradients so
far (so far), or not. ``accumulation`` adds up 4 micro-batches in a buffer (exact), or in the moments of AdamW, as AdamA
does (arXiv 2305.19982): the second moment then has the squares of micro-batches (moments), here also times 4.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BETAS = (0.9, 0.95)
MICRO = 4
RULES = {"clipping": ("none", "exact", "last", "so far"), "accumulation": ("exact", "moments", "moments x 4")}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = (p.view(batch, length, 4, -1).transpose(1, 2) for p in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, width: int = 96, layers: int = 3, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 256, bias=False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.tokens(x) + self.places.weight)).flatten(0, 1), y.flatten())


def batch(data: Tensor, generator: torch.Generator, size: int, length: int = 64) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - length, (size,), generator=generator)
    rows = torch.stack([data[start : start + length + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def clip(params: list[nn.Parameter], rule: str, last: Tensor | None) -> Tensor:
    """Clip to a norm of 1 in the order of a backward; return the norm of all gradients before."""
    grads = [p.grad for p in reversed(params) if p.grad is not None]
    norms = torch.stack([grad.norm() for grad in grads])
    total, so_far = norms.norm(), norms.square().cumsum(0).sqrt()
    zero = torch.zeros(()) if last is None else last
    by = {"exact": total.expand(len(grads)), "last": zero.expand(len(grads)), "so far": so_far.maximum(zero)}
    for grad, norm in zip(grads, by[rule], strict=True):
        grad.mul_(torch.clamp(1 / (norm + 1e-6), max=1))
    return total


def fold(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], times: int, *, last: bool) -> None:
    """Add gradients to the moments, so that AdamW's step with the last gradient decays and adds as AdamA does."""
    beta1, beta2 = BETAS
    for p in params:
        state = optimizer.state[p]
        if not state:
            state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        assert p.grad is not None
        state["exp_avg_sq"].addcmul_(p.grad, p.grad, value=(times - last) * (1 - beta2) / beta2)
        if not last:
            state["exp_avg"].add_(p.grad, alpha=(1 - beta1) / beta1)
            p.grad = None


def train(data: Tensor, rule: str, seed: int, steps: int, *, what: str, bad: float) -> float:
    """Train one GPT; return its validation loss."""
    torch.manual_seed(seed)
    model, cut = GPT(), len(data) * 9 // 10
    params, rate = list(model.parameters()), 3e-3 if what == "clipping" else 2e-3
    optimizer = torch.optim.AdamW(params, lr=rate, betas=BETAS, weight_decay=0.1)
    generator, spoils = (torch.Generator().manual_seed(seed + offset) for offset in (1, 2))
    norm, number = None, 1 if what == "clipping" else MICRO
    for step in range(steps):
        half_cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 30) * half_cosine
        for micro in range(number):
            x, y = batch(data[:cut], generator, 8 if number == 1 else 4)
            spoilt = torch.rand((), generator=spoils).item() < bad
            y = torch.randint(256, y.shape, generator=spoils) if spoilt else y
            (model.loss(x, y) * (30 if spoilt else 1) / number).backward()
            if rule.startswith("moments"):
                fold(optimizer, params, MICRO if "x" in rule else 1, last=micro == number - 1)
        if what == "clipping" and rule != "none":
            norm = clip(params, rule, norm)
        optimizer.step()
        optimizer.zero_grad()
    generator.manual_seed(9)
    with torch.no_grad():
        return statistics.fmean(model.loss(*batch(data[cut:], generator, 32)).item() for _ in range(8))


def main() -> None:
    """Print a row per rule."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backward_updates", description=__doc__)
    parser.add_argument("what", choices=RULES)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bad", type=float, default=0.02, help="the share of bad batches, for clipping")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    data = torch.tensor(list(b"".join(page.read_bytes() for page in pages)))
    bad = options.bad if options.what == "clipping" else 0.0
    for rule in RULES[options.what]:
        losses = [train(data, rule, seed, options.steps, what=options.what, bad=bad) for seed in range(options.seeds)]
        each = " ".join(f"{loss:.3f}" for loss in losses)
        print(f"{options.what}, {bad:.0%} bad batches, {rule}: {statistics.fmean(losses):.4f} ({each})", flush=True)


if __name__ == "__main__":
    main()
