"""Small models for sharding, and the hand-written torchao and torch loops that ours are held against."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 64
VOCABULARY = 32
TOKENS = 16


class Block(nn.Module):
    def __init__(self, bias: bool = True):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, seed: int = 0, depth: int = 2, bias: bool = True):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(bias) for _ in range(depth))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def with_conv1d(model: Net) -> Net:
    """Give a Net the layers of GPT-2: its own weights, transposed."""
    from transformers.pytorch_utils import Conv1D

    for block in model.blocks:
        for name in ("up", "down"):
            linear = getattr(block, name)
            conv = Conv1D(linear.out_features, linear.in_features)
            with torch.no_grad():
                conv.weight.copy_(linear.weight.t())
                conv.bias.copy_(linear.bias)
            setattr(block, name, conv)
    return model


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
