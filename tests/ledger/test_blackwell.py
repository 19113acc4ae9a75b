"""Compiled layers in NVFP4, on a B200 that computes nothing."""

import json
from pathlib import Path

import pytest

from benchmarks.ledger import launch
from tests import forked
from tests.ledger.test_worlds import LAYERS, LINEARS, NORMS, ROOT, ring


def on_a_b200(code):
    environ = launch.environment("b200")
    return forked.python("-c", code, cwd=Path(__file__).parents[2], environ=environ)


COMPILED = """
import torch
from benchmarks.ledger.recorder import recording
from benchmarks.ledger.untuned import take_first_variant
from lightning_lowprec import NVFP4TorchAO

take_first_variant()
plugin = NVFP4TorchAO(compile=False, last_blocks_bf16=0.0, forward_finish=0.0)
model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False)).cuda()
plugin.bind_device(torch.device("cuda"))
plugin.convert_module(model)
compiled = torch.compile(model, fullgraph=True)
x = torch.randn(64, 256, device="cuda", requires_grad=True)
with recording() as log, torch.autocast("cuda", torch.bfloat16):
    compiled(x).sum().backward()
print(sorted(record.get("a") for record in log.of("gemm")))
"""


def test_three_products_of_codes_compile():
    """Two more products are the Hadamard transforms of both operands of the weight gradient."""
    done = on_a_b200(COMPILED)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == str(["bfloat16"] * 2 + ["float4_e2m1fn"] * 3)


ENCODED = """
import torch
from benchmarks.ledger import triton_bytes
from benchmarks.ledger.recorder import recording
from benchmarks.ledger.untuned import take_first_variant
from lightning_lowprec.products.nvfp4 import encode

take_first_variant()
triton_bytes.start()
compiled = torch.compile(encode, fullgraph=True, dynamic=False)
rows = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
with recording() as log:
    compiled(rows, False, True, "transformer_engine")
kernels = [record.name for record in log.of("kernel") if record.name in triton_bytes.KERNELS]
print(sum(triton_bytes.KERNELS[name] for name in kernels) / rows.numel())
"""


def test_nothing_is_written_between_values_and_codes():
    """Per value, in bytes: 2 read for the largest values and 2 for the codes, 1 / 2 written; per 16 values, the largest
    one is written, read for that of the matrix, and read for the scale (float32 each), which is written."""
    done = on_a_b200(ENCODED)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 4.5 < float(done.stdout.splitlines()[-1]) < 2 + 2 + 1 / 2 + (4 + 4 + 4 + 4 + 1) / 16


GATHERED = """
import json
from pathlib import Path
from benchmarks.ledger.world_case import Case, run

row = run(Case(shape="8b", world=8, precision="nvfp4-torchao", layers=2, tokens=64))
print(json.dumps(row, default=str))
"""


@pytest.mark.rehearsed
def test_a_rank_of_fsdp2_gathers_half_a_byte_per_parameter_of_nvfp4():
    """Rank 0 of 8: codes of both blocks in forward and again in backward; norms, and the root once, in bf16."""
    done = on_a_b200(GATHERED)
    assert done.returncode == 0, done.stderr[-3000:]
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["outcome"] == "ok", row
    codes, norms, root = 0.5 * LAYERS * LINEARS, LAYERS * 2 * NORMS, 2 * ROOT
    assert row["wire"]["all_gather"] == ring(2 * (codes + norms) + root, 8)
    assert row["dtypes"]["all_gather"] == ["bfloat16", "uint8"]
    promised = row["promised"]
    assert row["wire"]["all_gather"] == promised["all_gather_forward"] + promised["all_gather_backward"]
    assert row["wire"]["scales"] == promised["scales"] == 2 * ring(4 * LAYERS * LINEARS / 16**2, 8), "float32 per tile"
