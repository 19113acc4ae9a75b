"""FSDP2 over NCCL with one GPU: everything but a second rank. On CPU (a dry run) the backend is gloo."""

import os

import lightning as L
import pytest
import torch
from torch import distributed as dist
from torch import nn

from lightning_lowprec import FabricFSDP2Strategy, FSDP2Strategy
from lightning_lowprec.names import TABLE
from tests.gpu.device import DEVICE, NO_VALUES, on_gpu_only, process_group_if_no_nccl
from tests.gpu.subjects import NAMES, Stack, Subject, loader, trainer
from tests.gpu.test_training import skip_unless_it_runs

TENSORWISE = ["fp8-hybrid", "fp8-hybrid-fp16"]


@pytest.fixture(autouse=True)
def own_process_group(request, monkeypatch):
    """Each test has a group of its own, and leaves none; only the test of compiling compiles."""
    before = dict(os.environ)
    callspec = getattr(request.node, "callspec", None)
    name = callspec.params.get("name") if callspec else None
    if name in TENSORWISE:  # not when tests are collected: asking needs a CUDA that works
        skip_unless_it_runs(name)
    if "compiled" not in request.node.name:
        monkeypatch.setattr("torch.nn.Module.compile", lambda self, *args, **kwargs: None)
    process_group_if_no_nccl(real="resuming" in request.node.name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def sharded_of(module: nn.Module):
    from lightning_lowprec.fsdp2.strategy import _sharded

    return _sharded[module].sharded


@pytest.mark.parametrize("name", [name for name in NAMES if not TABLE[name].plugin.keeps_codes])
def test_the_loss_falls_in_the_trainer(name):
    skip_unless_it_runs(name)
    model = Subject()
    trainer(precision=name, strategy="fsdp2", max_epochs=15).fit(model, loader(), loader())
    assert model.losses[-1] < 0.8 * model.losses[0] or NO_VALUES


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_lightnings_names_train(name):
    model = Subject()
    trainer(precision=name, strategy="fsdp2", max_epochs=15).fit(model, loader(), loader())
    assert model.losses[-1] < 0.8 * model.losses[0] or NO_VALUES


@pytest.mark.parametrize("name", TENSORWISE)
def test_float8_goes_over_the_wire_and_changes_nothing(name):
    """Against the same precision that gathers in high precision: the same loss in the first step, close ones later."""
    losses = {}
    for gather in (True, False):
        fabric = L.Fabric(
            accelerator=DEVICE.type, devices=1, precision=name, strategy=FabricFSDP2Strategy(fp8_all_gather=gather)
        )
        fabric.launch()
        torch.manual_seed(0)
        module = Stack()
        module, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=3e-3))
        losses[gather] = []
        for x, y in list(fabric.setup_dataloaders(loader())) * 5:
            loss = nn.functional.mse_loss(module(x).float(), y)
            fabric.backward(loss)
            fabric.clip_gradients(module, optimizer, max_norm=1.0, error_if_nonfinite=not NO_VALUES)
            optimizer.step()
            optimizer.zero_grad()
            losses[gather].append(loss.item())
        scales = sharded_of(module.module).scales
        assert (scales is not None) == gather
        if gather:
            assert scales.reductions == len(losses[gather]) or NO_VALUES  # fp16 may skip any step
    assert losses[True] == pytest.approx(losses[False], rel=0.03) or NO_VALUES


@pytest.mark.parametrize("name", TENSORWISE)
def test_inference_mode_between_steps(name):
    """Under nccl the Trainer evaluates in inference mode, where a gathered weight could never train again."""
    model = Subject()
    trainer(precision=name, strategy="fsdp2", max_epochs=15, val_check_interval=1).fit(model, loader(), loader())
    assert model.losses[-1] < 0.8 * model.losses[0] or NO_VALUES


@pytest.mark.parametrize("name", TENSORWISE[:1] if NO_VALUES else TENSORWISE)
def test_compiled_blocks_agree_with_eager_ones(name):
    losses = {}
    for compile_blocks in (False, True):
        torch._dynamo.reset()
        model = Subject()
        strategy = FSDP2Strategy(compile={"backend": "inductor"} if compile_blocks else False)
        trainer(precision=name, strategy=strategy, max_epochs=5).fit(model, loader())
        losses[compile_blocks] = model.losses
    assert losses[True] == pytest.approx(losses[False], rel=0.05) or NO_VALUES


@pytest.mark.parametrize("name", TENSORWISE)
def test_offloaded_to_cpu(name):
    model = Subject()
    strategy = FSDP2Strategy(cpu_offload=True)
    trainer(precision=name, strategy=strategy, max_epochs=15, gradient_clip_val=1.0).fit(model, loader())
    assert model.losses[-1] < 0.8 * model.losses[0] or NO_VALUES
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@on_gpu_only
def test_the_backend_is_nccl_and_float8_needs_no_disguise():
    """gloo knows no float8, so ours always sends bytes; NCCL takes those too."""
    fabric = L.Fabric(accelerator="cuda", devices=1, precision="fp8-hybrid", strategy="fsdp2")
    fabric.launch()
    assert dist.get_backend() == ("fake" if NO_VALUES else "nccl")
    codes = torch.randn(64, device=DEVICE).to(torch.float8_e4m3fn)
    received = torch.empty_like(codes)
    from lightning_lowprec.fsdp2.traffic import ByteGather

    ByteGather()(received, codes, dist.group.WORLD)
    assert torch.equal(received.view(torch.uint8), codes.view(torch.uint8)) or NO_VALUES


@pytest.mark.parametrize("name", TENSORWISE)
@pytest.mark.parametrize("state_dict_type", ["sharded", "full"])
def test_resuming_is_exact(name, state_dict_type, tmp_path):
    def new(epochs):
        return trainer(precision=name, strategy=FSDP2Strategy(state_dict_type=state_dict_type), max_epochs=epochs)

    through, first, second = Subject(), Subject(), Subject()
    new(4).fit(through, loader())
    half = new(2)
    half.fit(first, loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    new(4).fit(second, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert through.losses[-6:] == second.losses[-6:] or NO_VALUES
