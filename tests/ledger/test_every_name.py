"""Every precision trains on CUDA tensors, and raises on every device that lacks its formats.

    python -m benchmarks.ledger.launch --device b200 python -m tests.ledger.test_every_name [NAME ...]

trains three steps in every name, on the null GPU of this process, and prints what happened as JSON.
"""

import json
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.ledger import launch, triton_bytes
from benchmarks.ledger.recorder import recording
from benchmarks.ledger.untuned import take_first_variant
from benchmarks.rivals import models, setups
from benchmarks.rivals.running import Job
from lightning_lowprec import HalfMixed
from tests import forked
from tests.representatives import TABLE, WITH_MASTERS, once, representatives

ROOT = Path(__file__).parents[2]
TE_BLACKWELL = {"mxfp8-te", "nvfp4-te"}
NEEDS_BLACKWELL = {*TE_BLACKWELL, "mxfp8"}
ROWWISE = {name for name in representatives() if name.startswith("fp8-rowwise")}
NEEDS_HOPPER = NEEDS_BLACKWELL | {"fp8-block-te", "fp8-block-te-remainder"}
FP8 = {name for name in representatives() if name.startswith(("fp8", "mxfp8", "nvfp4", "msamp"))}
REFUSES = {
    "h200": NEEDS_BLACKWELL,
    "b200": set(),
    "rtx5090": TE_BLACKWELL | ROWWISE,  # nobody knows about torchao's MXFP8 there: a warning
    "rtx4090": NEEDS_HOPPER,
    "a100": FP8,
}
COMPILES_LONG = {"fp8-block", "mxfp8", "msamp-o1", "msamp-o2", "msamp-o3"}
"""10 to 20 seconds on each device."""
COMPILED_ON = {"b200": {"mxfp8"}, "rtx5090": set(), "rtx4090": {"msamp-o2"}, "a100": set()}
"""Which of them train on which device that is no H200: formats that an H200 lacks, and casts to
float8 on the oldest device that has them. `tests.ledger.test_products` runs Triton's products of blocks."""
STAND_FOR_ALL = ("bf16-remainder", "fp8-hybrid-fp16")
FLAG_READ = 2
"""Waits of a step with loss scaling: the copy of one flag to the host, and torch's synchronisation behind it."""


def tried_on(device):
    """All names that it refuses; of the others each plugin once, and of what does not depend on it two names."""
    trained = once(name for name in representatives() if name not in REFUSES[device])
    if device != "h200":
        of_masters = {name for name in trained if TABLE[name].plugin is HalfMixed or name in WITH_MASTERS}
        trained = [name for name in trained if name in STAND_FOR_ALL or not (name in of_masters or "fp16" in name)]
    if device in COMPILED_ON:
        trained = [name for name in trained if name in COMPILED_ON[device] or name not in COMPILES_LONG]
    return [*trained, *REFUSES[device]]


@pytest.fixture(scope="module", params=REFUSES)
def outcomes(request):
    device = request.param
    names = tried_on(device)
    environ = launch.environment(device)
    done = forked.python("-m", __name__, *names, cwd=ROOT, environ=environ)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(names)
    return device, found


def test_names_train_or_raise_with_the_device_and_a_way_out(outcomes):
    device, found = outcomes
    errors = {name: outcome["error"] for name, outcome in found.items() if "error" in outcome}
    assert errors.keys() == REFUSES[device]
    for name, error in errors.items():
        assert re.match(rf"RuntimeError: `precision='{name}'` cannot run: .*compute capability.* \[.+\]", error), error
        assert "Use " in error, name


def test_what_a_step_waits_for_sends_and_multiplies_is_that_of_its_name(outcomes):
    device, found = outcomes
    for name, outcome in found.items():
        if "error" not in outcome:
            scaled = "fp16" in name  # the host reads one number per step, to skip a step with inf
            assert (outcome["waits"], outcome["read"]) == ((FLAG_READ, 1) if scaled else (0, 0)), name
            # an update launches one kernel per length of blocks, with addresses and numbers from pinned memory
            assert outcome["sent"] <= 3 * outcome["updates"], name
            assert outcome["updates"] <= (3 if "8bit" in name else 1), name
            assert outcome["sent from pageable memory"] == 0, name
            base = "float16" if "fp16" in name else "bfloat16"
            low = "float4_e2m1fn" if name.startswith("nvfp4") else "float8_e4m3fn"
            by_triton = device != "h200" and name == "fp8-block"
            low = low if name in FP8 and not by_triton else None
            assert outcome["refused"] == [], name
            assert set(outcome["formats"]) == {base, low} - {None}, name
            assert bool(outcome["rows of torchao's MX"]) == (name == "mxfp8"), name


def test_each_name_that_compiles_long_trains_on_one_device():
    """A name that is gone, or means what an earlier one means, would be left out without a word."""
    for device, names in COMPILED_ON.items():
        assert names == COMPILES_LONG.intersection(tried_on(device)) - REFUSES[device]
    assert {name for device in REFUSES for name in {*tried_on(device)} - REFUSES[device]} >= COMPILES_LONG


# ---- the program

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
