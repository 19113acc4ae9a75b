"""float32 accumulation and reduction under DDP: two gloo processes, against float64 sums over all micro-batches."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import strategies as of_fabric
from lightning.pytorch import strategies as of_trainer
from torch import Tensor, nn

from lightning_lowprec import FP8TorchAO, HalfMixed, registration
from lightning_lowprec.masters.optimizer import main_params
from lightning_lowprec.precision.loss_scale import LossScale
from tests.fsdp2.ranks import run
from tests.masters.accumulation import (
    FLOAT32,
    FORMS,
    Net,
    Recording,
    batches,
    exact_sum,
    flat,
    float32_bound,
    loss_of,
    plugin,
    relative_error,
)
from tests.toys import ON_CPU

pytestmark = pytest.mark.distributed
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
    strategy = of_fabric.DDPStrategy(process_group_backend="gloo", **options)
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


SEQUENCES = [f"{where} {form}" for where in ("trainer", "fabric") for form in FORMS]
OPTIONS = ["plain", "views", "unused", "small-buckets"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both ranks saw."""
    return run(worker, 2, tmp_path_factory.mktemp("ranks"))


def exact_mean(dtype=torch.bfloat16, scale=1.0):
    """The mean over both ranks of the float64 sums over their micro-batches, and of the magnitudes."""
    of_ranks = [exact_sum(batches(COUNT, seed=rank), dtype, scale) for rank in (0, 1)]
    return [[(a + b) / 2 for a, b in zip(*parts, strict=True)] for parts in zip(*of_ranks, strict=True)]


@pytest.mark.parametrize("case", SEQUENCES)
def test_the_mean_is_as_exact_as_float32(ranks, case):
    fp16 = case.endswith("fp16-master")
    exact, magnitudes = exact_mean(torch.float16, 8.0) if fp16 else exact_mean()
    for rank in ranks:
        (given,) = rank[case]
        assert relative_error(given, exact) <= float32_bound(exact, magnitudes, 2 * COUNT)


@pytest.mark.parametrize("where", ["trainer", "fabric"])
def test_without_the_option_it_is_not(ranks, where):
    exact, _ = exact_mean()
    half, whole = ranks[0][f"half {where}"][0], ranks[0][f"{where} bf16-master"][0]
    assert relative_error(half, exact) > 1000 * relative_error(whole, exact)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_ddp(ranks, option):
    exact, magnitudes = exact_mean()
    (given,) = ranks[0][f"options {option}"]
    assert relative_error(given, exact) <= float32_bound(exact, magnitudes, 2 * COUNT)


def test_synchronising_after_every_micro_batch(ranks):
    exact, magnitudes = exact_mean()
    (given,) = ranks[0]["sync-always"]
    assert relative_error(given, exact) <= float32_bound(exact, magnitudes, 3 * COUNT)


@pytest.mark.parametrize("case", ["manual", "clipped"])
def test_clipping(ranks, case):
    exact, _ = exact_mean()
    norm = flat(exact).norm()
    assert norm > 0.5
    (given,) = ranks[0][case]
    assert relative_error(given, [g * 0.5 / norm for g in exact]) < 1e-5  # clip_grad_norm_ divides by norm + 1e-6


@pytest.mark.parametrize("case", ["unused", "unused-reduce"])
def test_unused_parameters(ranks, case):
    """`never` has no gradient; `sometimes` that of rank 0 in its first micro-batch, halved, exactly."""
    net, _, sometimes = Net(), torch.nn.Linear(16, 8), torch.nn.Linear(16, 8).bfloat16()
    net.layers[1].bfloat16(), net.layers[3].bfloat16()
    batch = batches(2, seed=0)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(net(batch) + sometimes(batch), batch)
    expected = [grad.float() / 2 for grad in torch.autograd.grad(loss, list(sometimes.parameters()))]
    for rank in ranks:
        has, *grads = rank[case][0]
        assert has.tolist() == [True] * 6 + [False] * 2 + [True] * 2
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_a_mean_that_fp16_has_and_its_halves_have_not(ranks):
    for rank in ranks:
        assert torch.equal(rank["tiny"]["half"]["given"], torch.zeros(2))
        for how in ("reduce", "accumulate"):
            assert torch.equal(rank["tiny"][how]["given"], torch.full((2,), 2.0**-24))
        dtypes = {how: tiny["dtype"] for how, tiny in rank["tiny"].items()}
        assert dtypes == {"half": "torch.float16", "reduce": "torch.float16", "accumulate": "torch.float32"}


def test_two_modules_accumulate_side_by_side(ranks):
    for rank in ranks:
        a, b = rank["two-modules"]
        assert torch.equal(a, 1.5 * torch.full((2,), 1 + 2.0**-10))
        assert torch.equal(b, torch.full((2,), 1 + 2.0**-10))


def test_a_second_fit(ranks):
    exact, magnitudes = exact_mean()
    for given in ranks[0]["twice"]:
        assert relative_error(given, exact) <= float32_bound(exact, magnitudes, 2 * COUNT)
    assert len(ranks[0]["twice"]) == 2


def test_an_overflow_on_one_rank_within_no_sync_skips_the_step_of_both(ranks):
    for rank in ranks:
        assert rank["overflow"]["scale"] == 4.0
        # three micro-batches of (1, 1) on rank 0 and of (2, 1) on rank 1
        assert [given[0].tolist() for given in rank["overflow"]["given"]] == [[4.5, 3.0], [4.5, 3.0]]


@pytest.mark.parametrize("name", [*FORMS, "fp8"])
def test_masters_stay_bit_equal_between_ranks(ranks, name):
    first, second = (rank["weights"][name] for rank in ranks)
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    assert not torch.equal(first, ranks[0]["start"])


def test_errors(ranks):
    messages = ranks[0]["errors"]
    assert "call `fabric.backward(loss)` instead of `loss.backward()`" in messages["fabric"]
    assert "`grad_accumulation_dtype=torch.float32` under DDP adds gradients after every backward" in messages["behind"]
    assert "Use `sparse=False`, or `grad_reduce_dtype=None`." in messages["sparse"]
    assert "`grad_reduce_dtype=torch.float32` needs to see the DDP module, and did not" in messages["unseen"]


def test_a_comm_hook_of_the_users_own_is_not_overridden():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    def trainer(**options):
        strategy = of_trainer.DDPStrategy(ddp_comm_hook=bf16_compress_hook)
        plugin = HalfMixed("bf16", master_weights=True, **options)
        return L.Trainer(accelerator="cpu", strategy=strategy, plugins=plugin, logger=False)

    for options in ({"grad_reduce_dtype": torch.float32}, FLOAT32):
        with pytest.raises(ValueError, match=r"`ddp_comm_hook=bf16_compress_hook` does not go with.*Leave one of them"):
            trainer(**options)
    trainer()
