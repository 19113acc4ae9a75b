"""Manual optimization, GANs, models without blocks, uneven shards, BatchNorm; two gloo ranks."""

import gc
import tempfile
import weakref
from functools import partialmethod

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import lightning_lowprec  # noqa: F401  (registers the names)
from tests.fsdp2.ranks import parts, quietly, run
from tests.fsdp2.toy import full as whole
from tests.toys import ON_CPU, Block, Task

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def rows() -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def fitted(model, strategy, precision="32-true", devices=2, epochs=1, path=None):
    options = {"devices": devices, "strategy": strategy, "precision": precision, "max_epochs": epochs}
    trainer = L.Trainer(use_distributed_sampler=False, **ON_CPU, **options)
    data = torch.utils.data.TensorDataset(rows()[trainer.global_rank :: devices])
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8 // devices), ckpt_path=path)
    return model


def full(model):
    return whole(dict(model.named_parameters()))


def difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


class Gained(Block):
    def __init__(self):
        super().__init__(64)
        self.gain = nn.Parameter(torch.ones(1, 64))

    def forward(self, x):
        return super().forward(x) * self.gain.mean()


def flat():
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64))


class Manual(L.LightningModule):
    def __init__(self, edits="none", blocks=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*flat(), *[nn.Sequential(Gained(), Gained())] * blocks)
        self.automatic_optimization = False
        self.edits = edits
        self.seen, self.norm = {}, torch.zeros(())

    def forward(self, x):
        return self.net(x)

    def look(self, where, *_):
        self.seen[where] = all(p.grad is not None and p.grad.shape == p.shape for p in self.parameters())

    def training_step(self, batch):
        optimizer = self.optimizers()
        self.zero_grad()
        self.manual_backward(self(batch[0]).pow(2).mean())
        self.look("training_step")
        if self.edits == "clip":
            self.norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1e-2)
        if self.edits == "halve":
            for p in self.parameters():
                p.grad.mul_(0.5)
        if self.edits == "penalty":
            self.manual_backward(self(batch[0]).abs().mean())
        optimizer.step()
        if self.edits == "clamp":
            for p in self.parameters():
                p.data.clamp_(-0.02, 0.02)

    on_after_backward = partialmethod(look, "on_after_backward")
    on_before_optimizer_step = partialmethod(look, "on_before_optimizer_step")
    on_train_batch_end = partialmethod(look, "on_train_batch_end")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Gan(L.LightningModule):
    def __init__(self, blocks_in: str):
        super().__init__()
        torch.manual_seed(0)
        deep = nn.Sequential(nn.Linear(64, 64), nn.Sequential(Block(64), Block(64)), nn.Linear(64, 64))
        self.g, self.d = (deep, flat()) if blocks_in == "g" else (flat(), deep)
        self.automatic_optimization = False

    def forward(self, x, part):
        return (self.g if part == "g" else self.d)(x)

    def training_step(self, batch):
        for optimizer, sign in zip(self.optimizers(), (-1.0, 1.0), strict=True):
            self(batch[0], "g")  # a look, after which the weights of the root stay gathered
            self.toggle_optimizer(optimizer)
            made = self(batch[0], "g")
            loss = sign * torch.tanh(self(made, "d")).mean() + self(batch[0], "d").pow(2).mean() * (sign > 0)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.3, momentum=0.5) for part in (self.g, self.d)]


def with_norms():
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Linear(48, 64))
    return Task(
        net,
        loss=lambda net, batch: net(batch[0]).float().sub(1).pow(2).mean(),
        optimizer=lambda task: torch.optim.SGD(task.parameters(), lr=0.1),
    )


HOOKS = ("training_step", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")
MANUAL = [
    *(("32-true", edits, False) for edits in ("none", "clip")),
    *(("32-true", edits, True) for edits in ("clip", "halve", "penalty", "clamp")),
    *((precision, "clip", True) for precision in ("bf16-master", "fp8-hybrid")),
]


def manual_optimization_trains_as_ddp_with_gradients_that_user_code_edits(rank, precision, edits, blocks):
    sharded, expected = (fitted(Manual(edits, blocks), strategy, precision) for strategy in ("fsdp2", "ddp"))
    if precision == "32-true":
        weights = full(expected)
        assert difference(full(sharded), weights) < 1e-6 < difference(weights, full(Manual(edits, blocks)))
    else:
        assert whole(sharded.norm).item() == pytest.approx(expected.norm.item(), rel=0.02)
        assert expected.norm > 1e-2
    assert sharded.seen == dict.fromkeys(HOOKS, True)
    assert {type(p) for p in sharded.parameters()} == {DTensor}


def a_gan_trains_as_in_one_process(rank, blocks_in):
    alone = full(fitted(Gan(blocks_in), "auto", devices=1, epochs=2))
    begun = fitted(Gan(blocks_in), "fsdp2").trainer
    path = begun.strategy.broadcast(f"{tempfile.mkdtemp()}/gan.ckpt")
    begun.save_checkpoint(path)
    assert difference(full(fitted(Gan(blocks_in), "fsdp2", epochs=2, path=path)), alone) < 1e-5
    assert difference(full(Gan(blocks_in)), alone) > 1e-3


def batch_norm_stays_float32(rank, precision):
    model, by_ddp = (fitted(with_norms(), strategy, precision) for strategy in ("fsdp2", "ddp"))
    assert model.losses == pytest.approx(by_ddp.losses, rel=0.02)
    norm = model.net[0]
    assert {norm.weight.dtype, model.net[2].weight.dtype, norm.running_mean.dtype} == {torch.float32}


def no_unsharded_weight_stays_in_memory(rank):
    model = with_norms()
    before = [weakref.ref(p) for p in model.parameters()]
    fitted(model, "fsdp2", "bf16-remainder")
    gc.collect()
    assert sum(p().untyped_storage().nbytes() for p in before if p() is not None) == 0


@parts(
    *((manual_optimization_trains_as_ddp_with_gradients_that_user_code_edits, *case) for case in MANUAL),
    *((a_gan_trains_as_in_one_process, blocks_in) for blocks_in in ("g", "d")),
    *((batch_norm_stays_float32, precision) for precision in ("bf16-mixed", "fp8-hybrid", "bf16-remainder")),
    no_unsharded_weight_stays_in_memory,
)
def test_two_ranks(part, tmp_path):
    run(quietly, 2, tmp_path, *part)
