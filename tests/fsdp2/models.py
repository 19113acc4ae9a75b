"""A small language model for sharding, its batches and its whole weights."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.fsdp2 import toy
from tests.toys import Block, Stack

WIDTH = 64
VOCABULARY = 32
TOKENS = 16


class Net(Stack):
    def __init__(self, seed: int = 0):
        torch.manual_seed(seed)
        embedding = nn.Embedding(VOCABULARY, WIDTH)
        super().__init__(lambda: Block(WIDTH), head=("lm_head", WIDTH, VOCABULARY))
        self.embedding = embedding

    def forward(self, x):
        return super().forward(self.embedding(x))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, TOKENS + 1), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return toy.full(dict(model.state_dict()))


def same(one, other):
    return not toy.differences(one, other)
