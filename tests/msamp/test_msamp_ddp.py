"""MS-AMP's levels under DDP on two gloo ranks, in Trainer and Fabric: replicas, resuming, overflow, bytes, refusals."""

import lightning as L
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

import lightning_lowprec
from lightning_lowprec import MSAMP
from lightning_lowprec.msamp import values_of
from tests.fsdp2.ranks import launch
from tests.fsdp2.toy import QUIET, Toy, X, Y, adamw, fabric_for
from tests.numerics.test_fp8_average import Sent
from tests.precision.weights_left import as_trained

CLIP = 0.25
pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


def batches(rank, ranks):
    return list(zip(X[rank::ranks].split(4), Y[rank::ranks].split(4), strict=True))


def everything(model, optimizer):
    state = optimizer.state_dict()["state"].values()
    tensors = [*model.state_dict().values(), *(v for s in state for v in s.values() if isinstance(v, torch.Tensor))]
    return torch.cat([t.float().flatten() for t in tensors])


def assert_same_on_all_ranks(flat):
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    assert all(torch.equal(other, flat) for other in others), "the ranks differ"


def by_trainer(rank, ranks, epochs, path=None, seed=None, **options):
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=epochs, use_distributed_sampler=False,
        plugins=[as_trained(MSAMP(**options))], enable_checkpointing=False,
        accumulate_grad_batches=2, gradient_clip_val=CLIP, **QUIET,
    )  # fmt: skip
    model = Toy(rank if seed is None else seed)
    loader = torch.utils.data.DataLoader(batches(rank, ranks), batch_size=None)
    trainer.fit(model, loader, ckpt_path=path)
    return everything(model, trainer.optimizers[0]), trainer


def in_fabric(model, ranks, plugin=None):
    fabric = fabric_for(plugin or MSAMP(), ranks, strategy="ddp")
    return fabric, *fabric.setup(model, adamw(model))


def trains_and_resumes(rank, ranks, folder):
    """A resumed run has compiled blocks, which change no bit."""
    truth, _ = by_trainer(rank, ranks, 2)
    assert_same_on_all_ranks(truth)
    by_trainer(rank, ranks, 1)[1].save_checkpoint(folder / "first.ckpt")
    resumed, _ = by_trainer(rank, ranks, 2, folder / "first.ckpt", seed=9, compile={"backend": "aot_eager"})
    assert torch.equal(resumed, truth), "it does not resume exactly"


def skips(rank, ranks):
    for only_codes in (False, True):
        fabric, wrapped, optimizer = in_fabric(Toy(rank), ranks, MSAMP("O3", base="fp16"))
        scaler, before = fabric.strategy.precision.scaler, everything(wrapped, optimizer)
        scale, skipped = scaler.scale, scaler.skipped_steps
        x, y = batches(rank, ranks)[0]
        x = torch.full_like(x, float("inf")) if rank == 1 and not only_codes else x
        fabric.backward(F.cross_entropy(wrapped(x), y))
        if rank == 1 and only_codes:
            wrapped.module.blocks[0].up.weight.grad.mul_(float("inf"))
        if only_codes:  # Fabric's error_if_nonfinite=True would make an exception of it
            fabric.clip_gradients(wrapped, optimizer, max_norm=CLIP)
        optimizer.step()
        assert torch.equal(everything(wrapped, optimizer), before), "a rank stepped"
        assert (scaler.scale, scaler.skipped_steps) == (scale / 2, skipped + 1)


class Parts(nn.Module):
    """Weights that every rank uses, rank 1 alone, and nobody."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(32)
        self.always, self.sometimes, self.unused = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.always.weight.data *= 16**seed  # so that ranks have other scales

    def forward(self, x, both):
        return self.always(self.norm(x)) + (self.sometimes(x) if both else 0)


def averages(rank, ranks):
    """Of the gradients of all ranks, to two roundings to e4m3; a rank without a gradient counts as zero."""
    model = Parts(rank)
    fabric, wrapped, optimizer = in_fabric(model, ranks, MSAMP("O3"))
    assert_close(values_of(model.always.weight), Parts(0).always.weight, 2**-11)  # fp16: the weights of rank 0
    assert_same_on_all_ranks(wrapped(X[:16], both=False).detach())
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
    fabric.backward(wrapped(x, both=rank == 1).square().mean())
    assert (model.sometimes.weight.grad is None) == (rank == 0)
    layers = model.always, model.sometimes
    grads = [torch.zeros(32, 32) if (g := layer.weight.grad) is None else g + 0 for layer in layers]
    gathered = [torch.empty(2, 32, 32) for _ in range(ranks)]
    dist.all_gather(gathered, torch.stack(grads))
    fabric.clip_gradients(wrapped, optimizer, max_norm=1e9)
    for layer, expected in zip(layers, sum(gathered) / ranks, strict=True):
        assert_close(layer.weight.grad + 0, expected, 2**-3)
    assert model.unused.weight.grad is None
    fabric.backward(wrapped(x, both=False).square().mean())  # what is averaged already is averaged again
    model.sometimes.weight.grad.add_(torch.full((32, 32), float(rank)))  # written to in place, too
    model.always.requires_grad_(False)  # and one that is frozen now steps with its gradient
    optimizer.step()
    assert_same_on_all_ranks(everything(model, optimizer))


def assert_close(found, expected, rtol):
    torch.testing.assert_close(found, expected.detach(), rtol=rtol, atol=2**-9 * expected.abs().max().item())


def sends(rank, ranks):
    model = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 128))
    fabric, wrapped, optimizer = in_fabric(model, ranks)
    for accumulate in (1, 3):
        for i in range(accumulate):
            with fabric.no_backward_sync(wrapped, enabled=i < accumulate - 1):
                loss = wrapped(torch.randn(16, 128)).square().mean()
                with Sent() as backward:
                    fabric.backward(loss)
            assert backward.bytes <= 4 * (4 * 128), "biases and the norm, in float32"
        with Sent() as sent:
            fabric.clip_gradients(wrapped, optimizer, max_norm=CLIP)
            optimizer.step()
        optimizer.zero_grad()
        assert 1.0 <= sent.bytes / (2 * 128 * 128) <= 1.05


def refuses(rank, ranks):
    layers = (nn.Linear(32, 32, bias=False) for _ in range(2))
    model = nn.Sequential(*layers, nn.LayerNorm(32).requires_grad_(False))
    with pytest.raises(ValueError, match=r"every trainable parameter of Sequential .*`MSAMP\(\.\.\., keep=\['1'\]\)`"):
        in_fabric(model, ranks)


def wants_to_be_imported(rank, ranks):
    lightning_lowprec.unregister()
    try:
        _, wrapped, optimizer = in_fabric(Toy(), ranks)
        wrapped(X).sum().backward()
        with pytest.raises(RuntimeError, match=r"needs to see the DDP module.*import lightning_lowprec"):
            optimizer.step()
    finally:
        lightning_lowprec.register()


def clipped_alone(rank, ranks):
    """torch's clipping sees a rank's own gradients: their norms differ, and the ranks would drift apart."""
    model = Toy()
    fabric, wrapped, optimizer = in_fabric(model, ranks)
    x, y = batches(rank, ranks)[0]
    for clips in (True, rank == 1):  # on one rank only: the other must not wait for it
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(wrapped(x), y))
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        with pytest.raises(RuntimeError, match=r"clipped before they were averaged.*`fabric\.clip_gradients`"):
            optimizer.step()
    optimizer.zero_grad()
    fabric.backward(F.cross_entropy(wrapped(x), y))
    grads = [p.grad for p in model.parameters()]
    torch._foreach_mul_(grads, torch.tensor(0.5))  # a tensor that owes nothing to a norm does no harm
    nn.utils.get_total_norm(grads)  # nor does a look
    torch._foreach_mul_(grads, 0.5)  # nor a number
    fabric.clip_gradients(wrapped, optimizer, max_norm=0.01)
    nn.utils.clip_grad_norm_(model.parameters(), 0.005)
    optimizer.step(lambda: fabric.backward(F.cross_entropy(wrapped(x), y)))  # which returns nothing
    assert_same_on_all_ranks(everything(model, optimizer))


def evaluates(rank, ranks):
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp", precision="msamp-o3", use_distributed_sampler=False, **QUIET
    )
    outputs = trainer.predict(Toy(seed=rank), torch.utils.data.DataLoader(X, batch_size=16))
    assert_same_on_all_ranks(torch.cat(outputs).float())


def body(rank, ranks, folder):
    evaluates(rank, ranks)
    trains_and_resumes(rank, ranks, folder)
    skips(rank, ranks)
    averages(rank, ranks)
    sends(rank, ranks)
    refuses(rank, ranks)
    wants_to_be_imported(rank, ranks)
    clipped_alone(rank, ranks)


def test_two_ranks(tmp_path):
    launch(body, 2, tmp_path, tmp_path)
    launch(refuses, 1, tmp_path)
