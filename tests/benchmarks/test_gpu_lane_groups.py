"""An item of the GPU lane that makes a process group leaves none, neither in this process nor in a worker."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import distributed as dist

from benchmarks.gpu_lane import runner, worker
from benchmarks.gpu_lane.item import Item
from benchmarks.gpu_lane.settings import Settings
from benchmarks.gpu_lane.values import left_as_found


class Grouping:
    """Makes a group of one, as FSDP2 does; ``"bad"`` raises with it."""

    name = "grouping"

    def run(self, key, settings):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        os.environ |= {"RANK": "0", "MASTER_PORT": "1"}
        if key == "bad":
            raise ValueError("bad")
        return {"world_size": dist.get_world_size()}


def in_this_process(key):
    return runner.Inline(Grouping(), Settings()).run(Item(key=key), 10.0)


def in_a_worker(key):
    return worker._run(Grouping(), key, Settings())


@pytest.mark.parametrize("run", [in_this_process, in_a_worker])
@pytest.mark.parametrize(("key", "status"), [("good", "ok"), ("bad", "failed")])
def test_an_item_takes_its_group_and_variables_with_it(run, key, status, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29999")
    for _ in range(2):  # a second group could not be made beside the first
        assert run(key)["status"] == status
        assert not dist.is_initialized()
        assert ("RANK" in os.environ, os.environ["MASTER_PORT"]) == (False, "29999")


def test_a_group_that_was_there_stays():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with left_as_found():
            pass
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to do it")
def test_a_worker_dies_with_a_parent_that_is_killed():
    """In the middle of an item: it would go on beside the next call's on the GPU."""
    working = "from benchmarks.gpu_lane.item import _end_with_the_parent as e; e(); print('ready', flush=True); "
    child = f"{working}import time; time.sleep(120)"
    parent = (
        "import subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, start_new_session=True); "
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(120)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        process.kill()
    status = Path(f"/proc/{pid}/status")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and status.exists() and "State:\tZ" not in status.read_text():
        time.sleep(0.1)
    assert not status.exists() or "State:\tZ" in status.read_text()
