"""Programs of the Trainer and of Fabric that a seed draws: what users combine, each with small models and few steps."""

import copy
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace as Program
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_lowprec import plain
from tests.toys import ON_CPU

HALF = ("half-auto", "bf16-master", "bf16-remainder", "fp16-master", "bf16-8bit", "bf16-sr")
CODES = (
    "fp8-hybrid", "fp8-e4m3", "fp8-rowwise", "fp8-rowwise-gw-hp", "fp8-block", "mxfp8", "int8-mixed", "fp8-hybrid-fp16",
    "fp8-hybrid-remainder", "fp8-hybrid-8bit", "fp8-rowwise-sr", "fp8-block-remainder",
)  # fmt: skip
MSAMP = ("msamp-o1", "msamp-o2", "msamp-o3")
BATCHES, VOCABULARY = 6, 32  # batches of an epoch, of which there are two
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "AdamW": lambda groups, lr: torch.optim.AdamW(groups, lr, weight_decay=0.1),
    "Adam": lambda groups, lr: torch.optim.Adam(groups, lr),
    "SGD": lambda groups, lr: torch.optim.SGD(groups, 30 * lr, momentum=0.9),
    "RMSprop": lambda groups, lr: torch.optim.RMSprop(groups, lr),
    "Adagrad": lambda groups, lr: torch.optim.Adagrad(groups, lr),
}


def draw(seed: int) -> Program:
    r = Random(seed)
    name = r.choice((*HALF, *CODES, *MSAMP))
    resume, average = r.random() < 0.4, r.random() < 0.25
    two, host = r.random() < 0.25, r.choice(("trainer", "fabric"))
    return Program(
        seed=seed,
        name=name,
        host=host,
        model=r.choice(("mlp", "blocks", "tokens")),
        width=r.choice((32, 64) if name == "mxfp8" else (32, 48, 64)),
        batch=r.choice((3, 8, 16)),
        optimizer=r.choice(("AdamW", "Adam")) if name in MSAMP else r.choice(tuple(OPTIMIZERS)),
        two_optimizers=two,
        two_groups=r.random() < 0.3,
        accumulate=r.choice((1, 1, 2, 3)),
        clip=r.choice((None, "norm", "value")),
        frozen=r.random() < 0.25,
        tied=r.random() < 0.5,
        average=average and name not in MSAMP,
        again=not resume and r.random() < 0.2,  # whether the optimizers are set up again after the first epoch
        resume=resume,
        manual=two or r.random() < 0.25,
        penalty=r.random() < 0.25,  # whether a part of the loss is computed with autocast switched off
        schedule=r.random() < 0.3,
        between=lambda **running: None,  # called after every batch, with what the program works on
        world={"devices": 1},  # options of the Trainer and of Fabric
        rank=0,
        file=f"{seed}.ckpt",
    )


class Net(nn.Module):
    """Vectors or tokens in, ``VOCABULARY`` numbers out; an embedding may be tied to the head."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        w, tokens = p.width, p.model == "tokens"
        self.embed = nn.Embedding(VOCABULARY, w) if tokens else nn.Linear(w, w)
        self.body = nn.Sequential(*(_block(w, attends=p.model != "mlp") for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(w), nn.Linear(w, VOCABULARY, bias=False)
        if p.tied and tokens:
            self.head.weight = self.embed.weight
        self.body[0].requires_grad_(not p.frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embed(x))))


def _block(width: int, *, attends: bool) -> nn.Module:
    if attends:
        return nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Task(L.LightningModule):
    def __init__(self, p: Program) -> None:
        super().__init__()
        torch.manual_seed(p.seed)
        self.p, self.net = p, Net(p)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8)) if p.average else None
        self.automatic_optimization = not p.manual

    def forward(self, batch: list[Tensor]) -> Tensor:
        x, target = batch
        y = self.net(x)
        loss = F.cross_entropy(y.float().flatten(0, -2), target.flatten())
        if self.p.penalty:
            with torch.autocast("cpu", enabled=False):
                loss = loss + 0.01 * y.float().square().mean()
        return 0.1 * loss  # with a loss scale of 65,536, gradients of fp16 stay finite

    def configure_optimizers(self) -> Any:
        p, make, lr = self.p, OPTIMIZERS[self.p.optimizer], 2e-3
        last = [self.net.norm.weight, self.net.norm.bias]
        last += [] if p.model == "tokens" and p.tied else [self.net.head.weight]
        first = [q for q in self.net.parameters() if q.requires_grad and not any(q is other for other in last)]
        if p.two_optimizers:
            optimizers = [make(first, lr), make(last, 2 * lr)]
        else:
            optimizers = [make([{"params": first}, {"params": last}] if p.two_groups else first + last, lr)]
            optimizers[0].param_groups[-1]["lr"] *= 2 if p.two_groups else 1
        step = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers if p.schedule and not p.manual]
        return optimizers, [{"scheduler": s, "interval": "step"} for s in step]

    def training_step(self, batch: list[Tensor], i: int | None, only_loss: bool = False) -> Tensor | None:
        loss = self(batch)
        if self.p.manual and not only_loss:
            optimizers: Any = self.optimizers()
            optimizers = optimizers if self.p.two_optimizers else [optimizers]
            self.manual_backward(loss / self.p.accumulate)
            if (i + 1) % self.p.accumulate == 0:
                for optimizer in optimizers:
                    if self.p.clip:
                        self.clip_gradients(optimizer, 0.02, self.p.clip)
                    optimizer.step()
                    optimizer.zero_grad()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, i: int) -> None:
        if self.average is not None:
            self.average.update_parameters(self.net)
        if self.p.host == "trainer":
            trainer, strategy = self.trainer, self.trainer.strategy
            running = {"i": i, "batch": batch, "task": self, "optimizers": trainer.optimizers}
            self.p.between(
                **running,
                model=lambda batch: strategy.training_step(batch, None, only_loss=True),
                backward=lambda loss: strategy.backward(loss, None),
                save=lambda: trainer.save_checkpoint("between.ckpt"),
            )

    def on_train_epoch_start(self) -> None:
        if self.p.again and self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(batches(self.p), batch_size=None)


def batches(p: Program) -> list[list[Tensor]]:
    g, size = torch.Generator().manual_seed(p.seed + 1 + 1000 * p.rank), (p.batch, 5)
    tokens = [torch.randint(VOCABULARY, (2, *size), generator=g) for _ in range(BATCHES)]
    if p.model == "tokens":
        return [list(pair) for pair in tokens]
    return [[torch.randn(*size, p.width, generator=g), pair[1]] for pair in tokens]


def trained(p: Program, precision: str, prepare: Callable[[nn.Module], None] = lambda net: None) -> dict[str, Tensor]:
    """Return the float32 weights that a program ends with under a precision; ``prepare`` changes the model before."""
    task = (_in_trainer if p.host == "trainer" else _in_fabric)(p, precision, prepare)
    return {name: _of_this_rank(value.detach()).float().clone() for name, value in task.state_dict().items()}


def _of_this_rank(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _in_trainer(p: Program, precision: str, prepare: Callable[[nn.Module], None]) -> Task:
    clip = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": p.clip} if p.clip else {}
    steps = {} if p.manual else {"accumulate_grad_batches": p.accumulate, **clip}
    options: Any = {**ON_CPU, **p.world, **steps, "use_distributed_sampler": False, "precision": precision}
    path = None
    for epochs in (1, 2) if p.resume else (2,):
        task = Task(p)
        prepare(task.net)
        trainer = L.Trainer(max_epochs=epochs, **options)
        trainer.fit(task, ckpt_path=path)
        if epochs == 1:
            path = p.file
            trainer.save_checkpoint(path)
    return task


def _in_fabric(p: Program, precision: str, prepare: Callable[[nn.Module], None]) -> Task:
    for epochs in ((0,), (1,)) if p.resume else ((0, 1),):
        task = Task(p)
        prepare(task.net)
        fabric = L.Fabric(accelerator="cpu", precision=precision, **p.world)  # type: ignore[arg-type]
        fabric.launch()
        made, schedules = task.configure_optimizers()
        model, *optimizers = fabric.setup(task, *made)
        schedules = [each["scheduler"] for each in schedules]
        states = dict(zip("abcd", [*optimizers, *schedules], strict=False))
        state = {"model": model, **states, "precision": fabric.strategy.precision}
        if epochs == (1,):
            fabric.load(p.file, state)
        for epoch in epochs:
            if p.again and epoch == 1:
                made, schedules = task.configure_optimizers()
                schedules = [each["scheduler"] for each in schedules]
                optimizers = [fabric.setup_optimizers(o) for o in made]
            for i, batch in enumerate(batches(p)):
                fabric.backward(model(copy.copy(batch)) / p.accumulate)
                if (i + 1) % p.accumulate == 0:
                    _step(p, fabric, model, optimizers, schedules)
                task.on_train_batch_end(None, batch, i)
                running = {"i": i, "batch": batch, "task": task, "model": model, "optimizers": optimizers}
                p.between(**running, backward=fabric.backward, save=partial(fabric.save, "between.ckpt", state))
        if epochs == (0,):
            fabric.save(p.file, state)
    return plain(model) if p.world["devices"] == 1 else task  # type: ignore[return-value]


def _step(p: Program, fabric: Any, model: Any, optimizers: list[Any], schedules: list[Any]) -> None:
    for optimizer in optimizers:
        if p.clip:
            fabric.clip_gradients(model, optimizer, **{"max_norm" if p.clip == "norm" else "clip_val": 0.02})
        optimizer.step()
        optimizer.zero_grad()
    for schedule in schedules:
        schedule.step()
