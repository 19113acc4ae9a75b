"""`grad_accumulation_dtype=torch.float32` on one device, against the same gradients summed in float64."""

import copy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec import FP8TorchAO, HalfMixed, LossScale, plain, register, unregister
from tests.toys import ON_CPU

FLOAT32 = {"grad_accumulation_dtype": torch.float32}
FORMS = {"bf16-master": True, "bf16-remainder": "remainder", "bf16-sr": "stochastic", "fp16-master": True}


def plugin(form: str, **options: Any) -> HalfMixed:
    """A plugin with masters of a form; fp16 starts at a loss scale at which nothing overflows."""
    base = form[:4]
    scale = {"loss_scale": LossScale(initial=8.0)} if base == "fp16" else {}
    return HalfMixed(base, master_weights=FORMS[form], **scale, **options)


class Recording(torch.optim.SGD):
    """Keeps the gradients of every step it takes; the learning rate is 0, so the weights stay."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.0)
        self.given: list[list[Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        result = None if closure is None else closure()
        self.given.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        return result


class Net(L.LightningModule):
    """Linears in half precision after a BatchNorm in float32; trained automatically."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return loss_of(self(batch), batch)

    def configure_optimizers(self) -> Recording:
        self.recording = Recording(self.parameters())
        return self.recording


def loss_of(output: Tensor, batch: Tensor) -> Tensor:
    return F.mse_loss(output.float(), batch[:, :8].float())


def batches(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # numbers that fp16 and bf16 have: whoever casts a batch changes nothing
    return [torch.randn(8, 16, generator=generator).bfloat16().half().float() for _ in range(count)]


def exact_sum(micro_batches: list[Tensor], dtype: torch.dtype, scale: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """By plain torch: per parameter the float64 sum of the gradients of ``scale * loss / n``, and of their magnitudes.

    Each is computed as ``dtype`` weights under autocast compute it, and divided by ``scale``.
    """
    net = Net()
    for layer in (net.layers[1], net.layers[3]):
        layer.to(dtype)
    params = list(net.parameters())
    sums = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
    magnitudes = [torch.zeros_like(total) for total in sums]
    for batch in micro_batches:
        with torch.autocast("cpu", dtype=dtype):
            loss = net.training_step(batch.to(dtype)) / len(micro_batches)
        for total, magnitude, grad in zip(sums, magnitudes, torch.autograd.grad(loss * scale, params), strict=True):
            total += grad.double() / scale
            magnitude += grad.double().abs() / scale
    return sums, magnitudes


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def relative_error(given: list[Tensor], exact: list[Tensor]) -> float:
    return ((flat(given) - flat(exact)).norm() / flat(exact).norm()).item()


def float32_bound(exact: list[Tensor], magnitudes: list[Tensor], terms: int) -> float:
    """What recursive summation in float32 can lose at most, relative to the sum (Higham, sec. 4.2)."""
    return (terms * 2.0**-24 * flat(magnitudes).norm() / flat(exact).norm()).item()


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def by_trainer(precision, micro_batches, accumulate, net=Net, **options):
    model = net()
    options |= {"accumulate_grad_batches": accumulate} if model.automatic_optimization else {}
    trainer = L.Trainer(plugins=precision, max_epochs=1, num_sanity_val_steps=0, **options, **ON_CPU)
    trainer.fit(model, torch.utils.data.DataLoader(micro_batches, batch_size=None))
    return model.recording.given


def by_fabric(precision, micro_batches, accumulate):
    fabric, model = L.Fabric(accelerator="cpu", devices=1, plugins=precision), Net()
    module, optimizer = fabric.setup(model, model.configure_optimizers())
    for i, batch in enumerate(micro_batches, 1):
        fabric.backward(loss_of(module(batch), batch) / accumulate)
        if i % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model.recording.given


@pytest.mark.parametrize("count", [8, 64])
@pytest.mark.parametrize("run", [by_trainer, by_fabric])
@pytest.mark.parametrize("form", FORMS)
def test_the_sum_is_as_exact_as_float32(form, run, count):
    micro_batches = batches(count)
    exact, magnitudes = exact_sum(micro_batches, HALF[form[:4]], scale=8.0 if form == "fp16-master" else 1.0)
    (given,) = run(plugin(form, **FLOAT32), micro_batches, count)
    (half,) = run(plugin(form), micro_batches, count)
    assert relative_error(given, exact) <= float32_bound(exact, magnitudes, count)
    assert relative_error(half, exact) > 100 * relative_error(given, exact), "there was nothing to gain"


def test_an_overflow_amid_an_accumulation_costs_that_step_and_nothing_else():
    micro_batches = batches(12)
    micro_batches[5][0, 0] = float("inf")  # the second micro-batch of the second step
    precision = HalfMixed("fp16", master_weights=True, loss_scale=LossScale(initial=8.0), **FLOAT32)
    first, third = by_trainer(precision, micro_batches, 4, StatelessNet)
    assert precision.scaler.scale == 4.0
    assert precision.scaler.skipped_steps == 1
    for given, part, scale in ((first, micro_batches[:4], 8.0), (third, micro_batches[8:], 4.0)):
        exact, magnitudes = exact_sum(part, torch.float16, scale)
        assert relative_error(given, exact) <= float32_bound(exact, magnitudes, 4)


class StatelessNet(Net):
    """An infinite batch must not stay in the running statistics."""

    def __init__(self):
        super().__init__()
        self.layers[0].track_running_stats = False
        self.layers[0].running_mean = self.layers[0].running_var = None


def test_sparse_gradients_add_up_in_float32():
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin("bf16-master", **FLOAT32))
    table = nn.Embedding(4, 2, sparse=True)
    start = table.weight.detach().clone()
    module, optimizer = fabric.setup(table, torch.optim.SGD(table.parameters(), lr=1.0))
    for scale in (1.0, 2.0**-10):  # 1 + 2**-10 is no bf16 number
        fabric.backward((module(torch.tensor([1, 1])) * scale).sum())
    optimizer.step()
    start[1] -= 2 * (1 + 2.0**-10)
    assert torch.equal(plain(module).weight, start)


def test_a_copied_module_accumulates_in_float32_after_its_own_set_up():
    first = Net()
    L.Fabric(accelerator="cpu", devices=1, plugins=plugin("bf16-master", **FLOAT32)).setup(first)
    second = copy.deepcopy(first)
    assert second.layers[1].weight.dtype == torch.float32
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin("bf16-master", **FLOAT32))
    module, _ = fabric.setup(second, second.configure_optimizers())
    for batch in batches(2):
        fabric.backward(loss_of(module(batch), batch))
        assert second.layers[1].weight.grad.dtype == torch.float32


def test_before_any_optimizer_is_seen():
    """Without the names, Fabric shows the optimizer at its first step; gradients come before."""
    unregister()
    try:
        micro_batches = batches(8)
        exact, magnitudes = exact_sum(micro_batches, torch.bfloat16)
        (given,) = by_fabric(plugin("bf16-master", **FLOAT32), micro_batches, 8)
        assert relative_error(given, exact) <= float32_bound(exact, magnitudes, 8)
    finally:
        register()


@pytest.mark.parametrize("make", [HalfMixed, FP8TorchAO])
def test_refusals(make):
    field = "grad_accumulation_dtype"
    with pytest.raises(ValueError, match=f"`{field}=torch.float32` goes with `master_weights`.*always .* in float32"):
        make(**{field: torch.float32})
    for wrong in (torch.bfloat16, torch.float64, "fp32"):
        with pytest.raises(
            ValueError, match=rf"`{field}={wrong!r}` is not valid; expected one of: None.*torch.float32"
        ):
            make(master_weights=True, **{field: wrong})
    for host, options in ((L.Trainer, {"logger": False}), (L.Fabric, {})):
        with pytest.raises(ValueError, match=r"`grad_accumulation_dtype=torch.float32` does not run under .*'fsdp2'"):
            host(accelerator="cpu", strategy="ddp", plugins=make(master_weights=True, **FLOAT32), **options)
