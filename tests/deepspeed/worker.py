"""One of two ranks: all parts, one after the other, in one process; rank 0 writes the errors of both to a file."""

import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.deepspeed import on_cpu


def error_of(folder, part, args):
    try:
        part(folder, *args)
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    on_cpu.allow()
    from tests.deepspeed.parts import PARTS, REFERENCES, reference

    out = Path(sys.argv[1])
    for name in REFERENCES:
        reference(name)
    errors = {name: error_of(out.parent, *part) for name, part in PARTS.items()}
    by_rank = [None, None]
    dist.all_gather_object(by_rank, errors)
    if dist.get_rank() == 0:
        torch.save({name: [errors[name] for errors in by_rank] for name in errors}, out)
    dist.barrier()
    dist.destroy_process_group()
