"""Trains in every process it is started in, by Fabric and by the Trainer, and checks that the processes agree."""

import os
import sys
from functools import cache

import lightning as L
import torch

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed
from lightning_lowprec.tools.demo import ByteGPT, StdlibText
from tests.precision.weights_left import as_trained
from tests.toys import ON_CPU

SIZES = {"depth": 1, "width": 32, "heads": 2, "block_size": 32}
STEPS = 12


@cache
def batches(rank: int) -> list[torch.Tensor]:
    data = StdlibText(block_size=32, batch_size=8, max_bytes=200_000, train_windows=256, seed=rank)
    data.setup("fit")
    return [batch for _, batch in zip(range(STEPS), data.train_dataloader(), strict=False)]


def by_fabric(precision: str) -> tuple[torch.nn.Module, list[float], L.Fabric]:
    fabric = L.Fabric(accelerator="cpu", strategy="ddp", devices=2, precision=precision)
    torch.manual_seed(0)
    model = ByteGPT(**SIZES, lr=1e-2)
    configured = model.configure_optimizers()
    scheduler = configured["lr_scheduler"]["scheduler"]
    model, optimizer = fabric.setup(model, configured["optimizer"])
    losses = []
    for batch in batches(fabric.global_rank):
        loss = model.training_step(batch, 0)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return model.module, losses, fabric


def by_trainer(precision: str, loader: list) -> tuple[torch.nn.Module, L.Trainer]:
    torch.manual_seed(0)
    model = ByteGPT(**SIZES, lr=1e-2)
    trainer = L.Trainer(
        strategy="ddp",
        devices=2,
        plugins=as_trained(precision),
        max_steps=STEPS,
        use_distributed_sampler=False,
        **ON_CPU,
    )
    trainer.fit(model, train_dataloaders=torch.utils.data.DataLoader(loader, batch_size=None))
    return model, trainer


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def overflow_on_one_rank(precision: str, fabric: L.Fabric) -> None:
    """Both ranks skip the step, and both scales back off."""
    scaled = fabric.strategy.precision.scaler is not None
    if not scaled:
        return
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    module, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before, scale = flat(net), fabric.strategy.precision.scaler.scale
    batch = torch.ones(4, 16)
    if fabric.global_rank == 1:
        batch[0, 0] = float("inf")
    fabric.backward(module(batch).float().mean())
    optimizer.step()
    assert torch.equal(flat(net), before), "a rank stepped"
    assert fabric.strategy.precision.scaler.scale == scale / 2


def skipped_on_both_ranks() -> None:
    """With `skip_nonfinite=True`, a NaN on one rank costs both ranks the step, and leaves no other trace."""
    plugins = (
        lambda: HalfMixed("bf16", master_weights=True, skip_nonfinite=True),
        lambda: FP8TorchAO(skip_nonfinite=True),
        lambda: MSAMP("O2", skip_nonfinite=True),
    )
    for make in plugins:
        found = []
        for bad_step in (1, None):
            fabric = L.Fabric(accelerator="cpu", strategy="ddp", devices=2, plugins=make())
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16))
            module, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
            batches = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(fabric.global_rank))
            for number, batch in enumerate(batches):
                if number == 1 and bad_step is None:
                    continue
                bad = number == bad_step and fabric.global_rank == 1
                optimizer.zero_grad()
                fabric.backward(module(batch * float("nan") if bad else batch).float().square().mean())
                optimizer.step()
            found.append(flat(net))
            assert fabric.strategy.precision.skipped_steps == (bad_step is not None)
        assert torch.equal(*found), "the skipped step left a trace"
        assert torch.equal(*fabric.all_gather(found[0])), "ranks differ"


def main(precision: str) -> None:
    model, losses, fabric = by_fabric(precision)
    if precision.startswith("fp8"):
        assert len(fabric.strategy.precision.plan.converted) == 4, "qkv, proj, fc_in, fc_out"
    first, second = fabric.all_gather(flat(model))
    assert torch.equal(first, second), "ranks differ"
    mine, other = fabric.all_gather(torch.tensor(losses))
    assert not torch.equal(mine, other), "both ranks saw the same data"
    assert losses[-1] < losses[0] - 1.0, losses
    in_trainer, trainer = by_trainer(precision, batches(fabric.global_rank))
    assert trainer.world_size == 2
    gathered = fabric.all_gather(flat(in_trainer))
    assert torch.equal(gathered[0], gathered[1]), "ranks differ"
    assert torch.equal(flat(in_trainer), flat(model)), "Trainer and Fabric arrive at different weights"
    overflow_on_one_rank(precision, fabric)
    print(f"DDP-OK {precision} {fabric.global_rank}", flush=True)
    fabric.barrier()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(name)
    skipped_on_both_ranks()
    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of torch's that are alive at a regular exit have aborted it ("terminate called without ...")
