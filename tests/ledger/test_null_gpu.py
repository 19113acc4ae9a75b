"""The null GPU refuses what a GPU refuses, and hides nothing that it does not know."""

import ctypes
import json
from pathlib import Path

import pytest
import torch

from benchmarks.ledger import build, launch
from benchmarks.ledger.recorder import library, mark, recording
from tests import forked

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def fp8_product(m, k, n):
    """x @ w.t() with one scale each."""
    x, w = torch.empty(m, k, device="cuda", dtype=FP8), torch.empty(n, k, device="cuda", dtype=FP8).t()
    return torch._scaled_mm(x, w, *[torch.ones((), device="cuda")] * 2, out_dtype=BF16)


def test_records_say_shape_format_and_order():
    with recording() as log:
        mark("here")
        fp8_product(m=32, k=64, n=48)
    assert [r.name for r in log.of("mark")] == ["here"]
    (product,) = log.of("gemm")
    # BLAS counts columns: D' [n, m] = w [n, k] x' [k, m], the first factor transposed
    assert [product.number(key) for key in ("m", "n", "k", "ta", "tb", "lda")] == [48, 32, 64, 1, 0, 64]
    assert [product.get(key) for key in "abc"] == ["float8_e4m3fn", "float8_e4m3fn", "bfloat16"]
    assert [log.records[0].what, log.records[-1].what] == ["mark", "gemm"]


def test_waiting_and_copies_are_recorded():
    x = torch.ones(8, device="cuda")
    with recording() as log:
        x.sum().item()
        x.to("cpu")
        torch.ones(8).pin_memory().to("cuda", non_blocking=True)
    assert [r.name for r in log.of("memcpy")] == ["D2H", "D2H", "H2D"]
    assert ["pageable" in r.info for r in log.of("memcpy")[1:]] == [True, False]
    assert len(log.waits()) == 4  # two copies to the host, and torch waits after each


def test_what_is_not_known_fails_and_is_recorded():
    with recording() as log:
        assert library().cudaGraphDebugDotPrint(None, None, 0) == 801  # cudaErrorNotSupported
    assert [r.name for r in log.of("unknown")] == ["cudaGraphDebugDotPrint"]


REFUSALS = """
import json, torch
from tests.ledger.test_null_gpu import asked
torch.cuda.init()
cases = {
    "one scale": asked(), "not TN": asked(transpose_a=0), "odd row": asked(ld=72), "e5m2 twice": asked(a=29, b=29),
    "row scales": asked(scales=3), "block scales": asked(scales=4), "mx scales": asked(scales=2),
    "fp4": asked(a=33, b=33, scales=1), "bf16": asked(a=14, b=14, transpose_a=0),
}
print(json.dumps([torch.cuda.get_device_name(), torch.cuda.get_device_capability(), cases]))
"""
FINE = ""
TN, ROW = "not_TN", "leading_dimension_not_16_bytes"
HOPPER = {
    "not TN": TN,
    "row scales": FINE,
    "block scales": FINE,
    "mx scales": "mxfp8_needs_10.0",
    "fp4": "fp4_needs_10.0",
}
ADA = {**HOPPER, "row scales": "row_scales_need_9.0", "block scales": "block_scales_need_9.0"}
BLACKWELL = {**ADA, "not TN": FINE, "mx scales": FINE, "fp4": FINE}
ALL = {"one scale": FINE, "odd row": ROW, "e5m2 twice": "e5m2_times_e5m2", "bf16": FINE}


def asked(*, a=28, b=28, transpose_a=1, ld=64, scales=0):
    """Ask cuBLASLt for a kernel of A' B, k = 64, by the numbers of CUDA's headers; "" or the reason for none."""
    torch.mm(*[torch.empty(16, 16, device="cuda")] * 2)  # loads cuBLASLt
    lt, pointer = ctypes.CDLL("libcublasLt.so.13"), ctypes.c_void_p
    description, layouts = pointer(), [pointer(), pointer(), pointer()]
    lt.cublasLtMatmulDescCreate(ctypes.byref(description), 68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
    for attribute, value in ((3, transpose_a), (4, 0), (31, scales), (32, scales)):  # TRANSA, TRANSB, scale modes
        number = ctypes.c_int32(value)
        assert lt.cublasLtMatmulDescSetAttribute(description, attribute, ctypes.byref(number), 4) == 0
    rows = 64 if transpose_a else 48
    for layout, kind, size in zip(layouts, (a, b, 14), ((rows, 112 - rows), (64, 32), (48, 32)), strict=True):
        lengths = [ctypes.c_uint64(n) for n in size]
        lt.cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, *lengths, ctypes.c_int64(ld))
    found, result = ctypes.c_int(), ctypes.create_string_buffer(4096)
    with recording() as log:
        status = library().cublasLtMatmulAlgoGetHeuristic(
            None, description, layouts[0], layouts[1], layouts[2], layouts[2], None, 1, result, ctypes.byref(found)
        )
    assert (status == 0) == (found.value == 1) == (not log.of("refused"))
    return log.of("refused")[0].get("reason") if log.of("refused") else ""


@pytest.mark.parametrize(
    ("device", "name", "capability", "answers"),
    [
        ("h200", "NVIDIA H200", [9, 0], {**ALL, **HOPPER}),
        ("b200", "NVIDIA B200", [10, 0], {**ALL, **BLACKWELL}),
        ("rtx5090", "NVIDIA GeForce RTX 5090", [12, 0], {**ALL, **BLACKWELL, "not TN": TN}),
        ("rtx4090", "NVIDIA GeForce RTX 4090", [8, 9], {**ALL, **ADA}),
        ("a100", "NVIDIA A100-SXM4-80GB", [8, 0], {**dict.fromkeys({**ALL, **ADA}, "fp8_needs_8.9"), "bf16": FINE,
                                                   "fp4": "fp4_needs_10.0"}),
    ],
)  # fmt: skip
def test_each_device_refuses_what_its_hardware_refuses(device, name, capability, answers):
    done = forked.python("-c", REFUSALS, cwd=Path(__file__).parents[2], environ=launch.environment(device))
    assert json.loads(done.stdout.splitlines()[-1]) == [name, capability, answers], done.stderr


def test_without_a_compiler_or_headers_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.CannotBuild, match=r"apt install g\+\+"):
        build.compiler()
    monkeypatch.setattr(build, "packages", lambda: tmp_path)
    with pytest.raises(build.CannotBuild, match="nvidia-cuda-crt"):
        build.headers()
