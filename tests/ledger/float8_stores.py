"""Print, for each name, how many compiled kernels of two steps store float8, and in how many the store may go wrong.

python -m benchmarks.ledger.launch python -m tests.ledger.float8_stores [NAME ...]

A store may go wrong beside a minimum or maximum that keeps NaN by an instruction of its own: see
`lightning_lowprec.private.inductor`. The sources are those that torch's inductor writes for CUDA.
"""

from __future__ import annotations

import json
import re
import sys
import warnings

import torch
from torch._inductor.utils import run_and_get_code

from benchmarks.gpu_lane import models, setups
from benchmarks.gpu_lane.running import Job
from benchmarks.ledger.untuned import take_first_variant

NAMES = ("fp8-hybrid", "fp8-rowwise", "fp8-tensorwise-remainder", "msamp-o1", "msamp-o2", "msamp-o3", "bf16-lean")
SHAPE = models.SHAPES["toy"]


def kernels(name: str) -> list[str]:
    """Return the sources of the Triton kernels that two steps compile."""
    torch._dynamo.reset()
    job = Job(shape=SHAPE, device=torch.device("cuda"), compile=True)
    data = models.batches(SHAPE, 2, job.device, count=1)
    running = setups.ours(job, name=name)
    _, sources = run_and_get_code(lambda: [running.step(data) for _ in range(2)])
    return [
        kernel for source in sources for kernel in re.findall(r"async_compile\.triton\(.*?'''(.*?)'''", source, re.S)
    ]


def main(names: list[str]) -> None:
    """Print [kernels that store float8, of them those with the instruction] by name, as JSON."""
    warnings.simplefilter("ignore")
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch._inductor.config.force_disable_caches = True
    take_first_variant()
    found = {}
    for name in names or NAMES:
        stores = [kernel for kernel in kernels(name) if "fp8e4nv" in kernel or "float8e4nv" in kernel]
        found[name] = [len(stores), sum("PropagateNan" in kernel for kernel in stores)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
