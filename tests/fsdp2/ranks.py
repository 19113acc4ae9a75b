"""Runs a function in several gloo processes and brings back what each of them returns."""

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing


def free_port() -> int:
    """One that nobody listens on just now: test files run side by side."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


def run(worker, ranks: int, folder: Path, *args):
    """``[worker(rank, *args) for every rank]``, each in a process of its own, in one process group."""
    multiprocessing.spawn(_main, args=(worker, ranks, free_port(), str(folder), args), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _main(rank: int, worker, ranks: int, port: int, folder: str, args) -> None:
    os.environ |= {
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
