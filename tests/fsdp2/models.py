"""Small models for sharding, and the hand-written torchao and torch loops that ours are held against."""

import torch
from torch import nn
from torch.nn import functional as F

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
    """The gathered weights, by plain names."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.state_dict().items()
    }


def same(one, other):
    """Return whether two dicts hold the same values, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def hand_sharded(model: nn.Module, mesh, fp8: bool, **policy) -> nn.Module:
    """What a torchao user writes: convert with FP8 all-gather, shard blocks and root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if fp8:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, fqn: "lm_head" not in fqn)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy, cast_forward_inputs=False))
    return model
