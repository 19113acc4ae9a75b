"""A signal to a rank, or its death, ends a Trainer run on all ranks, with an error, within seconds."""

import multiprocessing
import os
import signal
import time

import lightning as L
import pytest
import torch

from tests.fsdp2.ranks import enter, free_port, launch
from tests.fsdp2.toy import QUIET, Toy, X, Y

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
SECONDS = 60  # generous: it takes two on an idle machine
ENDINGS = {
    "SIGTERM to all": (signal.SIGTERM, (0, 1)),
    "SIGTERM to rank 0": (signal.SIGTERM, (0,)),
    "SIGTERM to rank 1": (signal.SIGTERM, (1,)),
    "rank 0 is killed": (signal.SIGKILL, (0,)),
    "rank 1 is killed": (signal.SIGKILL, (1,)),
}


def trains_for_ever(rank, ranks, port, folder):
    os.setsid()
    enter(rank, port)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)

    class Started(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 5:
                (folder / f"started.{rank}").write_text("")

    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy="fsdp2", precision="fp8-hybrid", max_epochs=-1,
        callbacks=[Started()], enable_checkpointing=False, **QUIET,
    )  # fmt: skip
    try:
        trainer.fit(Toy(), loader)
    except BaseException as error:
        (folder / f"raised.{rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def wait_for(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def ends(rank, ranks, folder, number, targets):
    """In a process that has imported what the ranks need, and that they are forked from."""
    context, port = multiprocessing.get_context("fork"), free_port()
    processes = [context.Process(target=trains_for_ever, args=(rank, 2, port, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        assert wait_for(lambda: len(list(folder.glob("started.*"))) == 2, 120), "did not start"
        for target in targets:
            os.kill(processes[target].pid, number)
        ended = wait_for(lambda: not any(p.is_alive() for p in processes), SECONDS)
        assert ended, f"{[p.is_alive() for p in processes]} still run after {SECONDS} s"
        raised = {file.name: file.read_text() for file in folder.glob("raised.*")}
        killed = {f"raised.{target}" for target in targets if number == signal.SIGKILL}
        assert raised.keys() == {"raised.0", "raised.1"} - killed, raised
        if number == signal.SIGTERM:
            assert any(raised[f"raised.{target}"].startswith("SIGTERMException") for target in targets), raised
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize(("number", "targets"), ENDINGS.values(), ids=ENDINGS)
def test_a_run_ends(tmp_path, number, targets):
    launch(ends, 1, tmp_path, tmp_path, number, targets)
