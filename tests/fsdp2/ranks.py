"""Runs a function in several gloo processes and brings back what each of them returns.

A process that imports torch, Lightning and this package takes five seconds to start. So they are imported once per
run of pytest: every world of ranks is forked from a host that has imported all of them, in 0.1 s, and nothing that a
world leaves behind reaches the next.
"""

import atexit
import faulthandler
import functools
import multiprocessing.context
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from contextlib import nullcontext, suppress
from datetime import timedelta
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from benchmarks.ledger.recorder import on_null_gpu
from tests.entry_points import read_once
from tests.garbage import leave_what_is_there
from tests.once import once

PRELOAD = [
    "lightning", "lightning.pytorch.cli", "torchao.float8", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.checkpoint", "pytest", "transformers.pytorch_utils",
]  # fmt: skip
"""What takes seconds to import. Not this package: a script shows what its own import of this package does."""
ASKS_CUDA = "torchao.float8"
"""Its import asks CUDA for devices, which CUDA allows in the processes that are forked later or in this one."""
IN_WORLDS = [
    *(f"lightning_lowprec.{name}" for name in ("callbacks", "fsdp2.strategy", "msamp", "tools.demo", "torchao.plugin")),
    "torch._inductor.compile_fx", "torchao.prototype.mx_formats", "transformers.models.mixtral.modeling_mixtral",
]  # fmt: skip
"""What the host of worlds imports too: this package, and what most worlds would import one by one."""
SECONDS = 240


def server() -> multiprocessing.context.ForkServerContext:
    """The server that forks processes. It starts with the first process."""
    context = multiprocessing.get_context("forkserver")
    names = [name for name in PRELOAD if not (name == ASKS_CUDA and on_null_gpu())]
    context.set_forkserver_preload([*names, "tests.garbage"])
    return context


def stop_server() -> None:
    """Stop the server, which lives as long as the host does. The next one writes to the stdout of that time."""
    _stop_host()
    forkserver._forkserver._stop()  # there is no public call


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


def run(worker, ranks: int, folder: Path, *args):
    """``[worker(rank, *args) for every rank]``; without arguments the workers of pytest-xdist share the results."""
    name = f"{worker.__module__}.{worker.__qualname__}.{ranks}"
    with nullcontext((folder, True)) if args else once(folder, name) as (results, missing):
        if missing:
            launch(_in_group, ranks, results, worker, results, args)
    return [torch.load(results / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def parts(*of_ranks):
    """Run a test for each part: a function of the rank, alone or before its arguments in a tuple."""
    cases = [part if isinstance(part, tuple) else (part,) for part in of_ranks]
    return pytest.mark.parametrize("part", cases, ids=lambda part: "-".join([part[0].__name__, *map(str, part[1:])]))


def quietly(rank: int, part, *args) -> None:
    warnings.simplefilter("ignore")
    part(rank, *args)


def launch(body, ranks: int, folder: Path, *args, seconds: float = SECONDS) -> None:
    """``body(rank, ranks, *args)`` in ``ranks`` processes; if one failed, the others have five seconds to end."""
    errors = [folder / f"{body.__name__}.{ranks}.{rank}.error" for rank in range(ranks)]
    task = pickle.dumps((body, args)), dict(os.environ), sys.path, os.getcwd()
    host, _ = _host()
    try:
        host.send((task, free_port(), errors, seconds))
        codes, hung = host.recv()
    except BaseException:  # what the host answers later is not for the next world
        _stop_host()
        raise
    texts = "\n".join(error.read_text() for error in errors)
    ended = f"of {ranks} ranks, {hung} did not end, and the exit codes by rank are {codes}"
    assert codes == dict.fromkeys(range(ranks), 0), f"{ended}:\n{texts}"


def enter(rank: int, port: int) -> None:
    environ = {"LOCAL_RANK": rank, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environ.items()})
    torch.set_num_threads(1)


def _in_group(rank: int, ranks: int, worker, folder: Path, args) -> None:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"})
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    torch.save(worker(rank, *args), folder / f"{rank}.pt")


@functools.cache
def _host() -> tuple[Connection, multiprocessing.process.BaseProcess]:
    ours, theirs = multiprocessing.Pipe()
    process = server().Process(target=_fork_worlds, args=(theirs,))
    process.start()
    theirs.close()
    return ours, process


@atexit.register
def _stop_host() -> None:
    """Close the pipe, with which the host ends, and wait for it: else nobody counts the time of its worlds."""
    if _host.cache_info().currsize:
        pipe, process = _host()
        _host.cache_clear()
        pipe.close()
        process.join()


def _fork_worlds(pipe: Connection) -> None:
    """Fork a world for each task that the pipe brings, and answer with its exit codes and the ranks that hang."""
    for name in IN_WORLDS:
        with suppress(ImportError):  # not all environments have all of it; a world that needs it will say so
            import_module(name)
    read_once()
    leave_what_is_there()
    while True:
        try:
            task, port, errors, seconds = pipe.recv()
        except EOFError:
            return
        pids = {_fork(task, rank, port, errors): rank for rank in range(len(errors))}
        codes: dict[int, int] = {}
        end = time.monotonic() + seconds
        while pids and time.monotonic() < end and not pipe.poll(0.02):  # it brings nothing now but its end
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                codes[pids[pid]] = code = os.waitstatus_to_exitcode(status)
                del pids[pid]
                end = min(end, time.monotonic() + 5) if code else end
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        pipe.send((codes, sorted(pids.values())))


def _fork(task: tuple[bytes, dict[str, str], list[str], str], rank: int, port: int, errors: list[Path]) -> int:
    """Return the process that does the task; in that process, never return."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    error = errors[rank].open("w")
    faulthandler.enable(error)
    try:
        pickled, environ, path, folder = task
        os.environ.clear()  # the server's
        os.environ |= environ
        sys.path[:] = path
        os.chdir(folder)
        enter(rank, port)
        body, args = pickle.loads(pickled)
        body(rank, len(errors), *args)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        code = 0
    except BaseException:
        error.write(f"rank {rank} of {len(errors)}: {traceback.format_exc()[-3000:]}")
    finally:
        error.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads of torch's that are alive at a regular exit have aborted it ("terminate called ...")
