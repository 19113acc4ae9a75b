"""Manual optimization, GANs, models without blocks, uneven shards, BatchNorm; two gloo ranks."""

import gc
import warnings
import weakref

import lightning as L
import pytest
import torch
from torch import nn

from tests.fsdp2.ranks import run
from tests.fsdp2.toy import full as whole
from tests.toys import QUIET, Block, Task

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
QUIET["use_distributed_sampler"] = False


def rows() -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def fitted(model, strategy, precision="32-true", devices=2, **kwargs):
    import lightning_lowprec  # noqa: F401

    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, precision=precision, max_epochs=1,
        **{**QUIET, **kwargs},
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(rows()[trainer.global_rank :: devices])
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8 // devices))
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

    def look(self, where):
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

    def on_after_backward(self):
        self.look("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.look("on_before_optimizer_step")

    def on_train_batch_end(self, *args):
        self.look("on_train_batch_end")

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
            self.toggle_optimizer(optimizer)
            made = self(batch[0], "g")
            loss = sign * torch.tanh(self(made, "d")).mean() + self(batch[0], "d").pow(2).mean() * (sign > 0)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.3) for part in (self.g, self.d)]


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
"""Precision, edits, whether there are blocks."""


def manual(rank):
    results = {}
    for case in MANUAL:
        for strategy in ("fsdp2", "ddp"):
            model = fitted(Manual(*case[1:]), strategy, case[0])
            kinds = {type(p).__name__ for p in model.parameters()}
            results[case, strategy] = full(model), whole(model.norm).item(), model.seen, kinds
    return results


def gans(rank):
    return {blocks_in: full(fitted(Gan(blocks_in), "fsdp2")) for blocks_in in ("g", "d")}


def norms(rank):
    results = {}
    for precision in ("bf16-mixed", "fp8-hybrid", "bf16-remainder"):
        for strategy in ("fsdp2", "ddp"):
            model = fitted(with_norms(), strategy, precision)
            dtypes = {p.dtype for p in (model.net[0].weight, model.net[2].weight)}
            results[precision, strategy] = model.losses, dtypes, model.net[0].running_mean.dtype
    return results


def memory(rank):
    model = with_norms()
    before = [weakref.ref(p) for p in model.parameters()]
    trainer_holds = fitted(model, "fsdp2", "bf16-remainder")
    gc.collect()
    return sum(p().untyped_storage().nbytes() for p in before if p() is not None), trainer_holds is model


def worker(rank):
    warnings.simplefilter("ignore")
    return {part.__name__: part(rank) for part in (manual, gans, norms, memory)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", MANUAL, ids=str)
def test_manual_optimization_trains_as_ddp_with_gradients_that_user_code_edits(results, case):
    weights, norm, seen, kinds = results[0]["manual"][case, "fsdp2"]
    expected, expected_norm, _, _ = results[0]["manual"][case, "ddp"]
    if case[0] == "32-true":
        assert difference(weights, expected) < 1e-6 < difference(expected, full(Manual(*case[1:])))
    else:
        assert norm == pytest.approx(expected_norm, rel=0.02)
        assert norm > 1e-2
    assert seen == dict.fromkeys(HOOKS, True)
    assert kinds == {"DTensor"}


@pytest.mark.parametrize("blocks_in", ["g", "d"])
def test_a_gan_trains_as_in_one_process(results, blocks_in):
    alone = full(fitted(Gan(blocks_in), "auto", devices=1))
    assert difference(results[0]["gans"][blocks_in], alone) < 1e-5
    assert difference(full(Gan(blocks_in)), alone) > 1e-3


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp8-hybrid", "bf16-remainder"])
def test_batch_norm_stays_float32(results, precision):
    losses, dtypes, running = results[0]["norms"][precision, "fsdp2"]
    assert losses == pytest.approx(results[0]["norms"][precision, "ddp"][0], rel=0.02)
    assert dtypes == {torch.float32}
    assert running == torch.float32


def test_no_unsharded_weight_stays_in_memory(results):
    assert results[0]["memory"] == (0, True)
