"""torchao's quantised optimizers under FSDP2: they train, and resume exactly, on any number of ranks."""

import pytest
import torch

from tests.fsdp2 import toy
from tests.fsdp2.ranks import launch
from tests.fsdp2.test_resume_fabric import state
from tests.fsdp2.test_resume_trainer import fit
from tests.fsdp2.toy import assert_same, everything, setup, train

pytestmark = pytest.mark.distributed
KINDS = ("sharded", "full")
NAMES = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
WIDTH = 64  # fc_in: 128 x 64 = 8192 elements, 4096 on each of two ranks


def maker(name):
    from torchao import optim

    return lambda model: getattr(optim, name)(model.parameters(), lr=1e-3)


def quantised(optimizer):
    values = [v for entry in optimizer.optimizer.state.values() for v in entry.values()]
    return [v for v in values if hasattr(getattr(v, "_local_tensor", v), "dequantize") and is_lowbit(v)]


def is_lowbit(value):
    return type(getattr(value, "_local_tensor", value)).__name__.startswith("OptimState")


def wide():
    toy.X = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.compiler.set_stance("force_eager")  # the same arithmetic, uncompiled: a kernel per shape takes seconds


def saves_and_goes_on(rank, ranks, folder):
    wide()
    for name in NAMES:
        for kind in KINDS:
            path = folder / f"{name}.{kind}.ckpt"
            fabric, model, optimizer = setup("fp8-hybrid", ranks, kind=kind, make=maker(name), width=WIDTH)
            first = train(fabric, model, optimizer, [0] * 4, ranks)  # the same batch
            assert first[-1] < first[0]
            assert len(quantised(optimizer)) == 8, "two moments of four weights"
            fabric.save(path, state(fabric, model, optimizer))
            saved = everything(model, optimizer, fabric.strategy.precision)
            if rank == 0:
                torch.save(saved, path.with_suffix(".truth"))
            losses = train(fabric, model, optimizer, range(3, 6), ranks)
            after = everything(model, optimizer, fabric.strategy.precision)

            fabric, model, optimizer = setup("fp8-hybrid", ranks, 7, kind, maker(name), WIDTH)
            fabric.load(path, state(fabric, model, optimizer))
            assert len(quantised(optimizer)) == 8, "still quantised"
            assert_same(everything(model, optimizer, fabric.strategy.precision), saved, path.name)
            assert train(fabric, model, optimizer, range(3, 6), ranks) == losses, path.name
            assert_same(everything(model, optimizer, fabric.strategy.precision), after, path.name)
        for precision in ("bf16-true", "bf16-remainder", "bf16-sr"):
            with pytest.raises(ValueError, match=f"`{name}` of torchao does not update sharded torch.bfloat16"):
                setup(precision, ranks, make=maker(name))
    setup("bf16-true", ranks, make=maker("_AdamW"))
    in_the_trainer(rank, ranks, folder)


def in_the_trainer(rank, ranks, folder):
    """Its scheduler sets a learning rate that is a tensor."""
    _, whole, _ = fit("fp8-hybrid", ranks, 2, make=maker("AdamW8bit"))
    trainer, begun, _ = fit("fp8-hybrid", ranks, 1, make=maker("AdamW8bit"))
    trainer.save_checkpoint(folder / "trainer.ckpt")
    _, resumed, look = fit("fp8-hybrid", ranks, 2, make=maker("AdamW8bit"), seed=5, path=folder / "trainer.ckpt")
    assert begun.losses + resumed.losses == whole.losses
    assert look.rate == pytest.approx(0.9e-3)


def loads_all(rank, ranks, folder):
    wide()
    for name in NAMES:
        for kind in ("full",) if ranks == 1 else ("sharded",):
            path = folder / f"{name}.{kind}.ckpt"
            fabric, model, optimizer = setup("fp8-hybrid", ranks, 7, kind, maker(name), WIDTH)
            fabric.load(path, state(fabric, model, optimizer))
            truth = torch.load(path.with_suffix(".truth"), weights_only=True)
            assert_same(everything(model, optimizer, fabric.strategy.precision), truth, path.name)
            assert quantised(optimizer), "blocks of 256 fit into 2048 elements"
            train(fabric, model, optimizer, range(3, 5), ranks)


def test_resume(tmp_path):
    launch(saves_and_goes_on, 2, tmp_path, tmp_path)
    launch(loads_all, 1, tmp_path, tmp_path)
    launch(loads_all, 4, tmp_path, tmp_path)
