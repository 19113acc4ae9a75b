"""`grad_accumulation_dtype=torch.float32` on one device: what the optimizer gets, and what users may do on the way."""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowprec import FP8TorchAO, HalfMixed, registration
from lightning_lowprec.masters.optimizer import main_params
from lightning_lowprec.precision.loss_scale import LossScale
from tests.masters.accumulation import (
    FLOAT32,
    FORMS,
    Net,
    Recording,
    batches,
    exact_sum,
    float32_bound,
    loss_of,
    plugin,
    relative_error,
)
from tests.toys import ON_CPU

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


def test_every_step_starts_from_zero():
    micro_batches = batches(12)
    first, second, third = by_trainer(plugin("bf16-master", **FLOAT32), micro_batches, 4)
    for given, part in ((first, micro_batches[:4]), (second, micro_batches[4:8]), (third, micro_batches[8:])):
        exact, magnitudes = exact_sum(part, torch.bfloat16)
        # BatchNorm's running statistics take no part in training: every step sees the same weights
        assert relative_error(given, exact) <= float32_bound(exact, magnitudes, 4)


class Manual(Net):
    """Accumulates four micro-batches by hand, looks at the gradients, clips them."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx=0):
        loss = super().training_step(batch)
        if not torch.is_grad_enabled() or self._trainer is None:
            return loss
        self.manual_backward(loss / 4)
        if (batch_idx + 1) % 4 == 0:
            optimizer = self.optimizers()
            assert all(p.grad.dtype == torch.float32 for p in self.parameters())
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("net", [Net, Manual])
def test_clipping_sees_the_float32_sum(form, net):
    micro_batches = batches(4)
    exact, _ = exact_sum(micro_batches, HALF[form[:4]], scale=8.0 if form == "fp16-master" else 1.0)
    norm = torch.cat([g.flatten() for g in exact]).norm()
    assert norm > 0.5
    clip = {"gradient_clip_val": 0.5} if net is Net else {}
    (given,) = by_trainer(plugin(form, **FLOAT32), micro_batches, 4, net, **clip)
    # clip_grad_norm_ divides by norm + 1e-6
    assert relative_error(given, [g * 0.5 / norm for g in exact]) < 1e-5


def test_hooks_see_and_edit_the_float32_sum():
    seen = []

    class Doubling(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen.extend(p.grad.dtype for p in module.parameters())
            for p in module.parameters():
                p.grad *= 2

    micro_batches = batches(4)
    exact, _ = exact_sum(micro_batches, torch.bfloat16)
    (given,) = by_trainer(plugin("bf16-master", **FLOAT32), micro_batches, 4, callbacks=[Doubling()])
    assert set(seen) == {torch.float32}
    assert relative_error(given, [2 * g for g in exact]) < 1e-6


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


def test_gradients_of_another_optimizer_follow_the_scale():
    """One optimizer overflows and halves the scale while the other holds float32 gradients under the old one."""
    precision = HalfMixed("fp16", master_weights=True, loss_scale=LossScale(initial=8.0), **FLOAT32)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=precision)
    a, b = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    module_a, opt_a = fabric.setup(a, Recording(a.parameters()))
    module_b, opt_b = fabric.setup(b, Recording(b.parameters()))
    x = torch.tensor([[3.0, 4.0]])
    fabric.backward(module_a(x).sum(), model=module_a)
    assert torch.equal(a.weight.grad, 8.0 * x)
    assert a.weight.grad.dtype == torch.float32
    fabric.backward(module_b(x * float("inf")).sum(), model=module_b)
    opt_b.step()
    assert precision.scaler.scale == 4.0
    fabric.backward(module_a(x).sum(), model=module_a)
    opt_a.step()
    assert torch.equal(opt_a.optimizer.given[0][0], 2 * x)
    assert opt_b.optimizer.given == []


def test_model_zero_grad_reaches_what_was_accumulated():
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin("bf16-master", **FLOAT32))
    model = Net()
    module, optimizer = fabric.setup(model, model.configure_optimizers())
    micro_batches = batches(2)
    loss_of(module(micro_batches[0]), micro_batches[0]).backward()  # bf16 on one device: no need of fabric.backward
    model.zero_grad()
    loss_of(module(micro_batches[1]), micro_batches[1]).backward()
    optimizer.step()
    exact, magnitudes = exact_sum(micro_batches[1:], torch.bfloat16)
    assert relative_error(model.recording.given[0], exact) <= float32_bound(exact, magnitudes, 1)


def test_sparse_gradients_add_up_in_float32():
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin("bf16-master", **FLOAT32))
    table = nn.Embedding(4, 2, sparse=True)
    module, optimizer = fabric.setup(table, torch.optim.SGD(table.parameters(), lr=1.0))
    start = next(iter(main_params(optimizer.optimizer))).detach().clone()
    for scale in (1.0, 2.0**-10):  # 1 + 2**-10 is no bf16 number
        fabric.backward((module(torch.tensor([1, 1])) * scale).sum())
    optimizer.step()
    master = next(iter(main_params(optimizer.optimizer)))
    expected = start.clone()
    expected[1] -= 2 * (1 + 2.0**-10)
    assert torch.equal(master, expected)


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
    registration.unregister()
    try:
        micro_batches = batches(8)
        exact, magnitudes = exact_sum(micro_batches, torch.bfloat16)
        (given,) = by_fabric(plugin("bf16-master", **FLOAT32), micro_batches, 8)
        assert relative_error(given, exact) <= float32_bound(exact, magnitudes, 8)
    finally:
        registration.register()


def test_a_half_precision_parameter_of_the_optimizer_alone():
    """It gets a master, and so a float32 gradient, although no module that was set up has it."""
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin("bf16-master", **FLOAT32))
    loose = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    fabric.setup_module(nn.Linear(2, 2))
    optimizer = fabric.setup_optimizers(Recording([loose]))
    for scale in (1.0, 2.0**-10):
        fabric.backward((loose * scale).sum())
    optimizer.step()
    assert optimizer.optimizer.given[0][0].item() == 1 + 2.0**-10


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def counted_step(precision):
    fabric, model = L.Fabric(accelerator="cpu", devices=1, plugins=precision), Net()
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True))
    with Ops() as ops:
        for batch in batches(2):
            fabric.backward(loss_of(module(batch), batch))
        optimizer.step()
    return ops.names


def test_a_step_without_the_option_has_no_operation_of_it():
    """Per half-precision parameter and micro-batch: one cast more, whatever else is the same."""
    plain, whole = counted_step(plugin("bf16-master")), counted_step(plugin("bf16-master", **FLOAT32))
    casts = [names.count("aten._to_copy.default") for names in (plain, whole)]
    assert casts[1] - casts[0] == 2 * 4
    moves = [names.count("aten._foreach_copy_.default") for names in (plain, whole)]
    assert moves[0] - moves[1] == 1, "float32 gradients are handed over to the masters, not copied"
    views = {"aten.as_strided.default", "aten.detach.default"}  # of the memory that the copies go to
    handed = {"aten._to_copy.default", "aten._foreach_copy_.default", "aten.empty_like.default", *views}
    assert [n for n in plain if n not in handed] == [n for n in whole if n not in handed]


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
