"""Twenty steps of a small model: every loss as an exact value, and a hash of the final weights.

The model has what the package treats in ways of its own: Linears of one and of several readers, a Conv1D, experts,
a tied head, a convolution, and norms.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.pytorch_utils import Conv1D

STEPS = 20
MICRO_BATCHES = 2
VOCABULARY = 64
WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix = Conv1D(WIDTH, WIDTH)
        config = MixtralConfig(
            hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_local_experts=2, num_experts_per_tok=1
        )
        config._experts_implementation = "grouped_mm"
        self.experts = MixtralSparseMoeBlock(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = self.mix(F.silu(self.q(h)) * self.k(h))
        out = self.experts(h)
        return x + (out[0] if isinstance(out, tuple) else out)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def batches(rank: int) -> Iterator[Tensor]:
    """(4, 18): tokens that are no multiple of 16, so that batches are padded."""
    made = torch.Generator().manual_seed(1 + rank)
    while True:
        start = torch.randint(VOCABULARY, (4, 1), generator=made)
        yield (start + torch.arange(18) * 3) % VOCABULARY


def train(rank: int, precision: str, **fabric: Any) -> dict[str, Any]:
    """Return the losses of this rank, as exact text, and a hash of all weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lightning = L.Fabric(accelerator="cpu", precision=precision, **{"devices": 1, **fabric})
    lightning.launch()
    model = Model()
    module, optimizer = lightning.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    data, losses = batches(rank), []
    for _ in range(STEPS):
        for micro in range(MICRO_BATCHES):
            with lightning.no_backward_sync(module, enabled=micro == 0):
                loss = module(next(data))
                lightning.backward(loss)
        losses.append(loss.item().hex())
        lightning.clip_gradients(module, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(name.encode())
        digest.update(value.detach().float().contiguous().numpy().tobytes())
    return {"losses": losses, "weights": digest.hexdigest()[:16]}


def worlds(rank: int, runs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return :func:`train` of precisions and strategies, on this rank of a gloo world."""
    import lightning_lowprec  # noqa: F401  # registers the names

    return [train(rank, name, strategy=strategy, devices=2) for name, strategy in runs]


def arithmetic() -> str:
    """Return a hash of products of this machine: another CPU sums in another order, and has other exact values."""
    made = torch.Generator().manual_seed(0)
    x, w = torch.randn(72, 96, generator=made), torch.randn(64, 96, generator=made)
    outs = [x @ w.t(), (x.bfloat16() @ w.bfloat16().t()).float(), (x.half() @ w.half().t()).float(), x.exp().sum(0)]
    return hashlib.sha256(b"".join(out.contiguous().numpy().tobytes() for out in outs)).hexdigest()[:16]
