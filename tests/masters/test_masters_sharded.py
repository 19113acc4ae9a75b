"""Masters of FSDP2 parameters: DTensors, on one process, as the unsharded run; through torch.distributed.checkpoint."""

from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import optim

from lightning_lowprec.masters import step as masters_step
from lightning_lowprec.masters.optimizer import add_masters, main_params, move_grads_to_masters
from tests.masters.master_loops import loss_of, masters_of, net, train

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),  # torch's own, of its own modules
]


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh, form, seed=0):
    from torch.distributed.fsdp import fully_shard

    model = net(seed).bfloat16()
    fully_shard(model, mesh=mesh)
    return model, add_masters(optim.AdamW(model.parameters(), lr=1e-3, foreach=True), form)


@pytest.mark.parametrize("form", ["fp32", "remainder", "stochastic"])
def test_trains_and_resumes_as_unsharded(mesh, form):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    plain = net().bfloat16()
    reference = add_masters(partial(optim.AdamW, lr=1e-3, foreach=True)(plain.parameters()), form)
    train(plain, reference, range(6))

    model, optimizer = sharded(mesh, form)
    train(model, optimizer, range(3))
    saved = get_optimizer_state_dict(model, optimizer)
    resumed, optimizer = sharded(mesh, form, seed=4)
    set_optimizer_state_dict(resumed, optimizer, saved)
    resumed.load_state_dict(model.state_dict())
    train(resumed, optimizer, range(3, 6))

    for p, q in zip(resumed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
    if form in ("fp32", "remainder"):
        for master, exact in zip(masters_of(optimizer), masters_of(reference), strict=True):
            assert torch.equal(master.full_tensor(), exact)


@pytest.mark.parametrize("form", ["fp32", "remainder"])
def test_clipping_by_a_factor_is_clipping_in_place(mesh, form, monkeypatch):
    """On GPUs gradients stay at the parameters, and the step multiplies them; here on DTensors of one process."""
    found = []
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(masters_step, "DEVICES", devices)
        model, optimizer = sharded(mesh, form)
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


def test_the_norm_is_that_of_all_meshes(mesh, monkeypatch):
    """Tensor parallelism shards some parameters over another mesh, and leaves others whole."""
    from torch.distributed.tensor import Shard, distribute_tensor

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
