"""An int8 layer on CUDA tensors: three products by torchao's kernel, few kernels around them, nothing that waits."""

import pytest
import torch
from torch import nn

from benchmarks.ledger.moved import Moved
from benchmarks.ledger.recorder import recording
from lightning_lowprec import Int8TorchAO

TOKENS, IN, OUT = 256, 512, 1024


def step(module, x):
    with torch.autocast("cuda", torch.bfloat16):
        output = module(x)
    output.sum().backward()


OPTIONS = {
    "int8": ({}, 3),
    "two-gemms": ({"recipe": {"*": {"grad_weight": "bf16"}}}, 2),
}


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *(pytest.param(name, False, id=f"{name}-eager") for name in OPTIONS),
        pytest.param("int8", True, id="int8-compiled"),
        pytest.param("two-gemms", True, id="two-gemms-compiled", marks=pytest.mark.rehearsed),
    ],
)
def test_products_by_torchaos_kernel(name, compiled):
    options, products = OPTIONS[name]
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False)).cuda()
    plugin = Int8TorchAO(compile=False, **options)
    plugin.bind_device(torch.device("cuda"))
    plugin.convert_module(model)
    module = torch.compile(model) if compiled else model
    x = torch.randn(TOKENS, IN, device="cuda", requires_grad=True)
    for _ in range(2):
        step(module, x)
    with torch.autograd.set_multithreading_enabled(False), recording() as log, Moved() as moved:
        step(module, x)
    assert [operation.name for operation in moved.operations if operation.kind == "product"].count("int8") == products
    kernels = [record.name for record in log.of("kernel")]
    assert sum("_scaled_int8_mm_kernel" in name for name in kernels) == products, kernels
    assert len(list(log.of("gemm"))) == 3 - products
    assert log.waits() == []
    # casts to bf16, codes of both operands of three products, sums and casts of gradients
    assert len(kernels) <= 28, kernels
