"""Train three steps in every name, on the null GPU of this process, and print what happened as JSON.

python -m benchmarks.ledger.launch --device b200 python -m tests.ledger.names_on [NAME ...]
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace

import torch

from benchmarks.ledger import triton_bytes
from benchmarks.ledger.recorder import recording
from benchmarks.ledger.untuned import take_first_variant
from benchmarks.rivals import models, setups
from benchmarks.rivals.running import Job
from tests.representatives import representatives

SHAPE = replace(models.SHAPES["toy"], ffn=models.SHAPES["toy"].hidden, kv_heads=models.SHAPES["toy"].heads)
"""All weights are square, so that each kernel that is compiled is compiled once."""
STEPS = 3


def outcome(name: str) -> dict[str, object]:
    """Train in this name, uncompiled; return what the last step waits for, copies and multiplies, or the error."""
    job = Job(shape=SHAPE, device=torch.device("cuda"), compile=False)
    data = models.batches(SHAPE, 2, job.device, count=1)
    try:
        running = setups.ours(job, name=name)
        for _ in range(STEPS - 1):
            running.step(data)
        with recording() as log:
            running.step(data)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    copies = log.of("memcpy")
    sent = [record for record in copies if record.name == "H2D"]
    return {
        "waits": len(log.waits()),
        "read": len([record for record in copies if record.name == "D2H"]),
        "sent": len(sent),
        "sent from pageable memory": len([record for record in sent if "pageable" in record.info]),
        "updates": len([record for record in log.of("kernel") if "step_parameters" in record.name]) or 1,
        "refused": [f"{r.name} {r.info}" for r in log.of("refused", "unknown")],
        "rows of torchao's MX": len([record for record in log.of("kernel") if record.name == "to_mxfp8_dim0_kernel"]),
        "formats": sorted({record.get("a") for record in log.of("gemm")}),
    }


def read_signs_of_nvfp4() -> None:
    """Let Transformer Engine read the signs of NVFP4's Hadamard transform, once, while all memory holds zeros.

    It reads them back from the GPU. Memory that the null GPU gives out again holds what was copied there before, which
    may be too large for the argument, a C++ int.
    """
    from transformer_engine.pytorch.tensor.nvfp4_tensor import get_random_sign_mask_for_rht

    get_random_sign_mask_for_rht(True, torch.cuda.current_device())


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    read_signs_of_nvfp4()
    torch.backends.cuda.enable_cudnn_sdp(False)
    take_first_variant()
    triton_bytes.start()  # for the tests' cache of kernels
    print(json.dumps({name: outcome(name) for name in names or representatives()}))


if __name__ == "__main__":
    main(sys.argv[1:])
