"""Runs a function in several gloo processes and brings back what each of them returns.

The processes are forked from one server that has imported the slow libraries: an import costs four seconds.
"""

import multiprocessing.context
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.multiprocessing
from torch import distributed as dist

PRELOAD = [
    "lightning", "lightning.pytorch.cli", "torchao.float8", "torchao.optim", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.checkpoint", "pytest", "transformers.pytorch_utils",
]  # fmt: skip
"""What takes seconds to import. Not this package: each process shows what the import of this package does."""


def server() -> multiprocessing.context.ForkServerContext:
    """The server that forks processes. It starts with the first process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def free_port() -> int:
    """One that nobody listens on just now: test files run side by side."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


def run(worker, ranks: int, folder: Path, *args):
    """``[worker(rank, *args) for every rank]``, each in a process of its own, in one process group."""
    server()
    arguments = worker, ranks, free_port(), str(folder), dict(os.environ), args
    torch.multiprocessing.start_processes(_main, arguments, ranks, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _main(rank: int, worker, ranks: int, port: int, folder: str, environ: dict[str, str], args) -> None:
    os.environ.clear()  # the server's
    os.environ |= environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    result = worker(rank, *args)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of torch's that are alive at a regular exit have aborted it ("terminate called without ...")
