"""Worlds of gloo processes of any size, and what went wrong in any of them."""

import os
import time
import traceback
from pathlib import Path

import torch
from torch import distributed as dist

from tests.fsdp2.ranks import free_port, server


def run(body, ranks: int, folder: Path, *args, timeout: float = 240) -> list[Path]:
    """``body(rank, *args)`` in ``ranks`` processes; raises with what went wrong in any of them."""
    context = server()
    port = free_port()
    results = [folder / f"{body.__name__}.{ranks}.{rank}" for rank in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(body, rank, ranks, port, results[rank], args)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + timeout
    while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes) and time.monotonic() < end:
        processes[0].join(0.05)
    for process in processes:  # if one failed, the others may wait for it for ever
        process.join(5 if any(p.exitcode for p in processes) else 0)
    hung = [i for i, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    texts = [file.read_text() if file.exists() else "no result" for file in results]
    assert all(text == "ok" for text in texts), f"of {ranks} ranks, {hung} did not end:\n" + "\n".join(texts)
    return results


def enter(rank: int, port: int) -> None:
    """Let Lightning find this process's place in a world."""
    environ = {"LOCAL_RANK": rank, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environ.items()})
    torch.set_num_threads(1)


def _rank(body, rank: int, ranks: int, port: int, result: Path, args: tuple) -> None:
    enter(rank, port)
    try:
        body(rank, ranks, *args)
        result.write_text("ok")
    except BaseException:
        result.write_text(f"rank {rank} of {ranks}: {traceback.format_exc()[-3000:]}")
        os._exit(1)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
