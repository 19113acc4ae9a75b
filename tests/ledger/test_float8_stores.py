"""From torch 2.14 on: no compiled kernel stores float8 beside a minimum or maximum that spoils it.

    python -m benchmarks.ledger.launch python -m tests.ledger.test_float8_stores NAME ...

prints, for each name, how many compiled kernels of two steps store float8, and in how many the store may go wrong:
beside a minimum or maximum that keeps NaN by an instruction of its own (`lightning_lowprec.private.torch_inductor`).
The sources are those that torch's inductor writes for CUDA.
"""

import json
import re
import subprocess
import sys
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

from benchmarks.ledger import launch
from benchmarks.ledger.untuned import take_first_variant
from benchmarks.rivals import models, setups
from benchmarks.rivals.running import Job

NAMES = {
    "h200": (
        *("fp8-hybrid", "fp8-hybrid-fp16", "fp8-e4m3", "fp8-hybrid-remainder", "fp8-rowwise"),
        *("fp8-rowwise-gw-hp", "fp8-block", "msamp-o1", "msamp-o2", "msamp-o3", "bf16-8bit"),
    ),
    "b200": ("fp8-block", "mxfp8"),
}
"""By device; Hopper has no MXFP8."""
FLOAT8 = re.compile(r"fp8e\d|float8_?e\d")
"""A dtype of one byte in Triton's code or in the types of its arguments: e4m3, e5m2 and the scales of MXFP8."""
SHAPE = models.SHAPES["toy"]


class Unmade:
    def run(self, *args: Any, **kwargs: Any) -> None:
        """Compute nothing, as the null GPU does."""


def kernels(name: str) -> list[str]:
    torch._dynamo.reset()
    job = Job(shape=SHAPE, device=torch.device("cuda"), compile=True)
    data = models.batches(SHAPE, 2, job.device, count=1)
    running = setups.ours(job, name=name)
    sources: list[str] = []

    def triton(self: AsyncCompile, kernel_name: str, source_code: str, device_str: str = "cuda") -> Unmade:
        sources.append(source_code)
        return Unmade()

    with patch.object(AsyncCompile, "triton", triton):
        for _ in range(2):
            running.step(data)
    return sources


def main(names: list[str]) -> None:
    """Print [kernels that store float8, of them those with the instruction] by name, as JSON."""
    warnings.simplefilter("ignore")
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch._inductor.config.force_disable_caches = True
    take_first_variant()
    found = {}
    for name in names:
        stores = [kernel for kernel in kernels(name) if FLOAT8.search(kernel)]
        found[name] = [len(stores), sum("PropagateNan" in kernel for kernel in stores)]
    print(json.dumps(found))


WITHOUT = (
    "import lightning_lowprec.private.torch_modules as mended; assert mended._FAULTY_FROM; "
    "mended._FAULTY_FROM = (99,); "
    "from tests.ledger import test_float8_stores as script; script.main(['msamp-o2'])"
)
pytestmark = pytest.mark.skipif(torch.__version__ < (2, 14), reason="older inductors write no such instruction")


def counted(device, *arguments):
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=launch.environment(device), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("device", NAMES)
def test_no_name_has_such_a_kernel(device):
    names = NAMES[device]
    found = counted(device, "-m", __name__, *names)
    assert [*found] == [*names]
    for name, (stores, spoiled) in found.items():
        assert (stores > 0) == (name != "bf16-8bit"), name
        assert spoiled == 0, name


def test_without_the_mend_there_are_some():
    (found,) = counted("h200", "-c", WITHOUT).values()
    assert found[1] > 0


if __name__ == "__main__":
    main(sys.argv[1:])
