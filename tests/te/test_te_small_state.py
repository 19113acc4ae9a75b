"""Transformer Engine's products with 8 bytes per parameter and FP8 gradients in DDP: the way beside MS-AMP.

`use_te=True` of MS-AMP is answered with `fp8-hybrid-te-8bit` and `fp8_gradient_hook`. The scales here are current ones,
which the reference quantizers have; the name's are delayed ones.
"""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec import FP8TE, fp8_gradient_hook
from tests.fsdp2.ranks import run
from tests.numerics.test_fp8_average import Sent
from tests.te.test_te_ranks import decibels
from tests.toys import Stack, gelu_block

pytestmark = pytest.mark.distributed
WIDTH = 64


def train(rank, hook, steps):
    """Return the gradients of the first step, the losses, the bytes sent per parameter, and the bytes at rest."""
    from tests.masters.master_loops import buffers_of
    from tests.te.reference import current_scaling

    plugin = FP8TE(current_scaling(), master_weights="8bit", norms=False)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=plugin)
    fabric.launch()
    model = Stack(lambda: nn.Sequential(gelu_block(WIDTH)), 2, head=("lm_head", WIDTH, WIDTH), seed=0)
    net, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if hook:
        (ddp,) = (module for module in net.modules() if isinstance(module, DistributedDataParallel))
        ddp.register_comm_hook(None, hook)
    size = sum(p.numel() for p in model.parameters())
    torch.manual_seed(10 + rank)
    x, y = torch.randn(64, WIDTH), torch.randn(64, WIDTH)
    grads, losses = {}, []
    for _ in range(steps):
        loss = (net(x).float() - y).square().mean()
        with Sent(2) as sent:
            fabric.backward(loss)
        grads = grads or {name: p.grad.float().clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    kept = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    tensors = [*model.parameters(), *kept, *buffers_of(optimizer)]
    rest = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    return {"grads": grads, "losses": losses, "wire": sent.bytes / size, "rest": rest / size}


def work(rank):
    from tests.te.reference import run_on_cpu

    run_on_cpu(pytest.MonkeyPatch())
    return train(rank, fp8_gradient_hook, 8), train(rank, None, 1)


def test_moments_of_8_bits_and_gradients_in_fp8(tmp_path):
    for hooked, plain in run(work, 2, tmp_path):
        assert hooked["losses"][-1] < 0.7 * hooked["losses"][0]
        assert hooked["wire"] == pytest.approx(1.0, abs=0.01)  # codes; 2.0 for a bf16 gradient without the hook
        assert plain["wire"] == pytest.approx(2.0, abs=0.01)
        assert 25 < decibels(hooked["grads"], plain["grads"]) < 40  # rounded to e4m3 twice
        assert 6.0 < hooked["rest"] < 6.3  # weight 2, master 2, moments 2, their exponents; a gradient adds 2
