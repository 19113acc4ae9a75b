"""Compiled layers in NVFP4, on a B200 that computes nothing."""

import subprocess
import sys

from benchmarks.ledger import launch

COMPILED = """
import torch
from benchmarks.ledger.recorder import recording
from lightning_lowprec import NVFP4TorchAO

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
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    done = subprocess.run(command, env=launch.environment("b200"), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == str(["bfloat16"] * 2 + ["float4_e2m1fn"] * 3)
