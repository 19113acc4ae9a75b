"""Gradients on their way to the masters: float32, accumulated, dropped."""

import pytest
import torch
from torch import distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_lowprec.masters import step as masters_step
from lightning_lowprec.masters.optimizer import (
    add_masters,
    held_masters,
    main_params,
    move_grads_to_masters,
    show_master_grads,
)
from tests.masters.master_loops import every_exact_form, every_form, half, loss_of, masters_of, net


def sgd(*params, form="fp32", lr=1.0):
    return add_masters(optim.SGD(params, lr=lr), form)


@every_form
def test_preparing_after_every_micro_batch_accumulates_in_float32(form):
    p = half(1.0)
    optimizer = sgd(p, form=form)
    for _ in range(1024):
        (p * 0.25).sum().backward()
        move_grads_to_masters(optimizer)
    (master,) = main_params(optimizer)
    assert master.grad.item() == 256.0  # bf16 stops at 64: 64.25 rounds back


@every_form
def test_float32_gradients_are_handed_over(form):
    p = half(1.0)
    p.grad_dtype = torch.float32
    optimizer = sgd(p, form=form)
    (p * 0.25).sum().backward()
    first = p.grad
    move_grads_to_masters(optimizer)
    (master,) = main_params(optimizer)
    assert master.grad is first
    assert p.grad is None
    (p * 0.5).sum().backward()  # a micro-batch after clipping
    move_grads_to_masters(optimizer)
    assert master.grad.item() == 0.75
    show_master_grads(optimizer)
    assert p.grad is master.grad
    optimizer.step()
    assert p.grad_dtype is torch.float32
    assert p.item() == 0.25
    p.grad = torch.ones(1)
    move_grads_to_masters(optimizer)
    optimizer.zero_grad()  # a skipped step leaves no float32 behind
    held = [store.flat.untyped_storage().nbytes() for store in optimizer._masters.stores]
    assert held == [0 if form != "fp32" else 32]


class Twice(optim.SGD):
    """Evaluates its closure a second time, as LBFGS does, or moves the weights before the first time."""

    def __init__(self, params, *, moves_first):
        super().__init__(params, lr=1.0)
        self.moves_first = moves_first

    def step(self, closure):
        if self.moves_first:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
        loss = closure()
        super().step()
        closure()
        return loss


@pytest.mark.parametrize("moves_first", [True, False])
def test_a_closure_that_an_optimizer_evaluates_where_it_has_moved_the_weights_is_refused(moves_first):
    p = half(4.0)
    optimizer = add_masters(Twice([p], moves_first=moves_first), "fp32")
    with pytest.raises(RuntimeError, match=r"^Twice evaluates its closure where .*`32-true`.*`torch.optim.AdamW`"):
        optimizer.step(lambda: p.square().sum().backward())
    assert next(main_params(optimizer)).item() == (5.0 if moves_first else -4.0), "masters and weights go together"
    assert p.item() == next(main_params(optimizer)).item()


def test_lbfgs_is_refused():
    with pytest.raises(TypeError, match=r"^LBFGS evaluates its closure where .*`32-true`.*`torch.optim.AdamW`"):
        add_masters(optim.LBFGS([half(4.0)]), "remainder")


def test_only_wrapped_optimizers():
    plain = optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(
        TypeError, match=r"expected an optimizer with masters, got SGD\. Call `add_masters` on it first"
    ):
        move_grads_to_masters(plain)
    assert list(main_params(plain)) == plain.param_groups[0]["params"]
    assert held_masters(plain) == []


torchs_warnings = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of its own modules


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@torchs_warnings
@every_exact_form
def test_clipping_by_a_factor_is_clipping_in_place(mesh, form, monkeypatch):
    """On GPUs gradients stay at the parameters, and the step multiplies them; here on DTensors of one process."""
    found = []
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(masters_step, "DEVICES", devices)
        model = fully_shard(net().bfloat16(), mesh=mesh)
        optimizer = add_masters(optim.AdamW(model.parameters(), lr=1e-3, foreach=True), form)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            assert masters_step.defers(optimizer) == bool(devices)
            if devices:
                norm = masters_step.clip_by_norm(optimizer, 1e-2)
            else:
                move_grads_to_masters(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(list(main_params(optimizer)), 1e-2).full_tensor()
            optimizer.step()
        found.append((norm, *(master.full_tensor() for master in masters_of(optimizer))))
    for clipped, expected in zip(*found, strict=True):
        torch.testing.assert_close(clipped, expected, rtol=1e-5, atol=1e-7)


@torchs_warnings
def test_the_norm_is_that_of_all_meshes(mesh, monkeypatch):
    """Tensor parallelism shards some parameters over another mesh, and leaves others whole."""
    monkeypatch.setattr(masters_step, "DEVICES", {"cpu"})
    other = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))["b"]
    plain = [torch.ones(4, 2).bfloat16(), torch.ones(8).bfloat16(), torch.ones(3).bfloat16(), torch.ones(5)]
    params = [distribute_tensor(plain[0], mesh, [Shard(0)]), distribute_tensor(plain[1], other, [Shard(0)]), *plain[2:]]
    params = [torch.nn.Parameter(p) for p in params]
    optimizer = add_masters(optim.SGD(params, lr=1.0), "fp32")
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    assert masters_step.defers(optimizer)
    norm = masters_step.clip_by_norm(optimizer, 1.0)
    assert norm.item() == pytest.approx((4 * 24) ** 0.5)
    optimizer.step()
    for p in params:
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        assert whole.float().flatten().tolist() == pytest.approx([1 - 2 / 96**0.5] * p.numel(), rel=2**-8)
