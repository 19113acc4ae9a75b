"""Ranks that are killed while they save: the run resumes from the checkpoint before, and saves again."""

import multiprocessing
import os
import signal
import time

import pytest
import torch

from tests.fsdp2.ranks import enter, free_port, launch
from tests.fsdp2.toy import assert_same, everything, setup, train

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
CASES = (("sharded", (1, 0)), ("sharded", (0,)), ("sharded", (1,)), ("full", (1, 0)))  # and who is killed


class Deadly:
    """Kills when it is written into a checkpoint: on rank 0, after all shards were written."""

    def __init__(self, pids):
        self.pids = pids

    def __reduce__(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        return (int, ())


def state(model, optimizer):
    return {"model": model, "optimizer": optimizer}


def dies(rank, port, folder, kind, victims):
    os.setsid()
    enter(rank, port)
    fabric, model, optimizer = setup("fp8-hybrid", 2, kind=kind)
    train(fabric, model, optimizer, range(2), 2)
    fabric.save(folder / "a.ckpt", state(model, optimizer))
    saved = everything(model, optimizer, fabric.strategy.precision)
    if rank == 0:
        torch.save(saved, folder / "truth")
    train(fabric, model, optimizer, range(2), 2)
    pids = fabric.all_gather(torch.tensor(os.getpid())).tolist()
    fabric.barrier()
    if 0 not in victims:
        os.kill(pids[1], signal.SIGKILL) if rank == 1 else None
    fabric.save(folder / "a.ckpt", {**state(model, optimizer), "deadly": Deadly([pids[i] for i in victims])})


def resumes(rank, ranks, folder):
    for case in sorted(folder.iterdir()):
        if not case.is_dir():
            continue
        fabric, model, optimizer = setup("fp8-hybrid", 2, seed=3, kind=case.name.split(".")[0])
        fabric.load(case / "a.ckpt", state(model, optimizer))
        loaded = everything(model, optimizer, fabric.strategy.precision)
        assert_same(loaded, torch.load(case / "truth", weights_only=True), case.name)
        fabric.save(case / "a.ckpt", state(model, optimizer))
        fabric.barrier()
        assert sorted(f.name for f in case.iterdir()) == ["a.ckpt", "truth"], "leftovers"


def saves_die(rank, ranks, place):
    """In a process that has imported what the ranks need, and that they are forked from."""
    context = multiprocessing.get_context("fork")
    for kind, victims in CASES:
        port = free_port()
        folder = place / f"{kind}.{len(victims)}.{victims[0]}"
        folder.mkdir()
        processes = [context.Process(target=dies, args=(r, port, folder, kind, victims)) for r in range(2)]
        for process in processes:
            process.start()
        end = time.monotonic() + 90
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert all(codes[victim] == -signal.SIGKILL for victim in victims), codes
        assert all(code not in (None, 0) for code in codes), f"the other rank hangs, or saved: {codes}"


def test_resumes_from_the_one_before(tmp_path):
    launch(saves_die, 1, tmp_path, tmp_path)
    launch(resumes, 2, tmp_path, tmp_path)
