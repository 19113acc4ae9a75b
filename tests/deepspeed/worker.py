"""One of two ranks: all runs, one after the other, in one process; rank 0 writes what it has seen to a file."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.deepspeed import on_cpu

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    on_cpu.allow()
    from tests.deepspeed import fabric_runs, trainer_runs

    out = Path(sys.argv[1])
    seen = {**fabric_runs.main(out.parent), **trainer_runs.main(out.parent)}
    if dist.get_rank() == 0:
        torch.save(seen, out)
    dist.barrier()
    dist.destroy_process_group()
