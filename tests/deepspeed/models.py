import torch
from torch import Tensor, nn

from tests import toys

WIDTH, VOCABULARY = 32, 32


class Net(toys.Block):
    """A block whose layers convert, and a head that stays; weights are bf16 values: ZeRO's masters start from these."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(WIDTH)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(p.to(torch.float16).to(torch.bfloat16))  # values that fp16 has too

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(super().forward(self.embed(tokens)))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ((tokens * 3 + 1) % VOCABULARY).flatten())


def batches(steps: int, rank: int, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, VOCABULARY, (steps, rows, 8), generator=generator)


class Task(toys.Task):
    def __init__(self) -> None:
        super().__init__(Net(), lambda net, tokens: loss_of(net(tokens), tokens), optimizer_of)

    def validation_step(self, tokens: Tensor, index: int) -> None:
        self.losses.append(self.loss(self.net, tokens).item())


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=3e-3)
