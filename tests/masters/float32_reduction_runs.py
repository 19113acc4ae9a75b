"""Two ranks train, and return what their optimizers were given."""

from typing import Any

import lightning as L
import torch
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_lowprec import FP8TorchAO, HalfMixed, registration
from lightning_lowprec.masters.optimizer import main_params
from lightning_lowprec.precision.loss_scale import LossScale
from tests.masters.accumulation import FLOAT32, FORMS, Net, Recording, batches, loss_of, plugin
from tests.toys import ON_CPU

REDUCE = {"grad_reduce_dtype": torch.float32}
QUIET = {**ON_CPU, "devices": 2, "max_epochs": 1, "use_distributed_sampler": False}
DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "small-buckets": {"bucket_cap_mb": 0.001},
}
COUNT = 8


def fabric_with(precision: Any, **options: Any) -> L.Fabric:
    strategy = DDPStrategy(process_group_backend="gloo", **options)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=precision)
    fabric.launch()
    return fabric


def by_trainer(precision: Any, micro_batches: list[Tensor], net: type[Net] = Net, **options: Any) -> list[list[Tensor]]:
    model = net()
    accumulate = {"accumulate_grad_batches": COUNT} if model.automatic_optimization else {}
    trainer = L.Trainer(strategy="ddp", plugins=precision, **QUIET, **accumulate, **options)
    trainer.fit(model, torch.utils.data.DataLoader(micro_batches, batch_size=None))
    return model.recording.given


def by_fabric(
    precision: Any, micro_batches: list[Tensor], net: type[Net] = Net, sync_always: bool = False, **options: Any
) -> list[list[Tensor]]:
    fabric, model = fabric_with(precision, **options), net()
    module, optimizer = fabric.setup(model, model.configure_optimizers())
    for i, batch in enumerate(micro_batches, 1):
        last = i % COUNT == 0
        with fabric.no_backward_sync(module, enabled=not last and not sync_always):
            fabric.backward(loss_of(module(batch), batch) / COUNT)
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return model.recording.given


class Manual(Net):
    """Every micro-batch synchronises, as manual optimization does by default; clips."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> None:
        self.manual_backward(super().training_step(batch) / COUNT)
        if (batch_idx + 1) % COUNT == 0:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class Partly(Net):
    """`never` is used on no rank, `sometimes` in the first micro-batch of rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(16, 8)
        self.sometimes = nn.Linear(16, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        first_of_rank_0 = self.calls == 1 and torch.distributed.get_rank() == 0
        return super().forward(x) + (self.sometimes(x) if first_of_rank_0 else 0)


class Noting(Recording):
    """Which parameters have a gradient, and the gradient of `sometimes`."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.given.append([torch.tensor([g is not None for g in grads]), *(g.clone() for g in grads[-2:])])


def unused(accumulating: bool) -> list[list[Tensor]]:
    precision = plugin("bf16-master", **(FLOAT32 if accumulating else REDUCE))
    fabric, model = fabric_with(precision, find_unused_parameters=True), Partly()
    module, optimizer = fabric.setup(model, Noting(model.parameters()))
    for i, batch in enumerate(batches(2, seed=fabric.global_rank)):
        with fabric.no_backward_sync(module, enabled=accumulating and i == 0):
            fabric.backward(loss_of(module(batch), batch))
    optimizer.step()
    return optimizer.optimizer.given


class Linear(nn.Module):
    """The gradient of `weight` is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def tiny(**options: Any) -> dict[str, Any]:
    """2**-24 on both ranks: halved before the sum, fp16 has nothing left of it, float32 has."""
    fabric, model = fabric_with(HalfMixed("fp16", master_weights=True, loss_scale=1.0, **options)), Linear()
    module, optimizer = fabric.setup(model, Recording(model.parameters()))
    fabric.backward(module(torch.full((2,), 2.0**-24).half()).float())
    dtype = str(model.weight.grad.dtype)
    optimizer.step()
    return {"given": optimizer.optimizer.given[0][0], "dtype": dtype}


def two_modules() -> list[Tensor]:
    """While one module's gradients wait to be reduced, the other one has its backward, synchronised."""
    fabric, a, b = fabric_with(plugin("bf16-master", **FLOAT32)), Linear(), Linear()
    module_a, optimizer_a = fabric.setup(a, Recording(a.parameters()))
    module_b, optimizer_b = fabric.setup(b, Recording(b.parameters()))
    for i, batch in enumerate(
        [torch.tensor([1.0, 2.0**-10]), torch.tensor([2.0**-10, 1.0])]
    ):  # sums are no bf16 numbers
        with fabric.no_backward_sync(module_a, enabled=i == 0):
            fabric.backward(module_a((batch * (1 + fabric.global_rank)).bfloat16()).float())
        fabric.backward(module_b(batch.bfloat16()).float())
    for optimizer in (optimizer_a, optimizer_b):
        optimizer.step()
    return [optimizer_a.optimizer.given[0][0], optimizer_b.optimizer.given[0][0]]


def fitted_twice(micro_batches: list[Tensor]) -> list[list[Tensor]]:
    """One plugin and one model, two trainers, each with a DDP module of its own."""
    model, precision, given = Net(), plugin("bf16-master", **FLOAT32), []
    for _ in range(2):
        trainer = L.Trainer(strategy="ddp", plugins=precision, accumulate_grad_batches=COUNT, **QUIET)
        trainer.fit(model, torch.utils.data.DataLoader(micro_batches, batch_size=None))
        given += model.recording.given
    return given


def overflow_on_one_rank() -> dict[str, Any]:
    """The second of three steps overflows on rank 1 in its second micro-batch, where ranks do not synchronise."""
    precision = HalfMixed("fp16", master_weights=True, loss_scale=LossScale(initial=8.0), **FLOAT32)
    fabric, model = fabric_with(precision), Linear()
    module, optimizer = fabric.setup(model, Recording(model.parameters()))
    for i in range(9):
        x = torch.tensor([float("inf") if i == 4 and fabric.global_rank == 1 else 1.0 + fabric.global_rank, 1.0])
        with fabric.no_backward_sync(module, enabled=i % 3 != 2):
            fabric.backward(module(x.half()).float())
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"given": optimizer.optimizer.given, "scale": precision.scaler.scale}


def errors() -> dict[str, str]:
    messages = {}
    fabric, model = fabric_with(plugin("bf16-master", **FLOAT32)), Linear()
    module, _ = fabric.setup(model, Recording(model.parameters()))
    try:
        module(torch.ones(2)).backward()
    except RuntimeError as error:
        messages["fabric"] = str(error)

    try:
        module._forward_module(torch.ones(2)).backward()  # not seen by Fabric either
    except RuntimeError as error:
        messages["behind"] = str(error)

    registration.unregister()
    fabric, model = fabric_with(plugin("bf16-master", **REDUCE)), Linear()
    module, optimizer = fabric.setup(model, Recording(model.parameters()))
    fabric.backward(module(torch.ones(2)))
    try:
        optimizer.step()
    except RuntimeError as error:
        messages["unseen"] = str(error)
    registration.register()

    fabric, table = fabric_with(plugin("bf16-master", **REDUCE)), nn.Embedding(4, 2, sparse=True)
    module, _ = fabric.setup(table, Recording(table.parameters()))
    try:
        fabric.backward(module(torch.tensor([1])).sum())
    except RuntimeError as error:
        messages["sparse"] = str(error)
    return messages


def weights_after(precision: Any, **options: Any) -> Tensor:
    """Two AdamW steps of four micro-batches."""
    fabric, model = fabric_with(precision, **options), Net()
    module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for i, batch in enumerate(batches(8, seed=fabric.global_rank), 1):
        with fabric.no_backward_sync(module, enabled=i % 4 != 0):
            fabric.backward(loss_of(module(batch), batch) / 4)
        if i % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in main_params(optimizer.optimizer)])


def worker(rank: int) -> dict[str, Any]:
    mine = batches(COUNT, seed=rank)
    results: dict[str, Any] = {}
    for form in FORMS:
        results[f"trainer {form}"] = by_trainer(plugin(form, **FLOAT32), mine)
        results[f"fabric {form}"] = by_fabric(plugin(form, **FLOAT32), mine)
    results["half trainer"] = by_trainer(plugin("bf16-master"), mine)
    results["half fabric"] = by_fabric(plugin("bf16-master"), mine)
    for name, options in DDP_OPTIONS.items():
        results[f"options {name}"] = by_fabric(plugin("bf16-master", **FLOAT32), mine, **options)
    results["sync-always"] = by_fabric(plugin("bf16-master", **FLOAT32), mine, sync_always=True)
    results["manual"] = by_trainer(plugin("bf16-master", **FLOAT32), mine, Manual)
    results["clipped"] = by_trainer(plugin("bf16-master", **FLOAT32), mine, gradient_clip_val=0.5)
    results["unused"], results["unused-reduce"] = unused(True), unused(False)
    results["tiny"] = {"half": tiny(), "reduce": tiny(**REDUCE), "accumulate": tiny(**FLOAT32)}
    results["two-modules"], results["twice"] = two_modules(), fitted_twice(mine)
    results["overflow"] = overflow_on_one_rank()
    results["weights"] = {form: weights_after(plugin(form, **FLOAT32)) for form in FORMS}
    results["start"] = torch.cat([p.detach().flatten() for p in Net().parameters()])
    fp8 = FP8TorchAO(master_weights=True, **FLOAT32)
    results["weights"]["fp8"] = weights_after(fp8)
    results["errors"] = errors()
    return results
