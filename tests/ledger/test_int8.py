"""An int8 layer on CUDA tensors: three products by torchao's kernel, few kernels around them, nothing that waits."""

import pytest
import torch
from torch import nn

from benchmarks.ledger.recorder import recording
from lightning_lowprec import Int8TorchAO

TOKENS, IN, OUT = 256, 512, 1024


def step(module, x):
    with torch.autocast("cuda", torch.bfloat16):
        output = module(x)
    output.sum().backward()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("options", "products"),
    [({}, 3), ({"recipe": {"*": {"grad_weight": "bf16"}}}, 2), ({"stochastic_rounding": True}, 3)],
    ids=["int8", "two-gemms", "stochastic"],
)
def test_products_by_torchaos_kernel(options, products, compiled):
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False)).cuda()
    plugin = Int8TorchAO(compile=False, **options)
    plugin.bind_device(torch.device("cuda"))
    plugin.convert_module(model)
    module = torch.compile(model) if compiled else model
    x = torch.randn(TOKENS, IN, device="cuda", requires_grad=True)
    for _ in range(2):
        step(module, x)
    with recording() as log:
        step(module, x)
    kernels = [record.name for record in log.of("kernel")]
    assert sum("_scaled_int8_mm_kernel" in name for name in kernels) == products, kernels
    assert len(list(log.of("gemm"))) == 3 - products
    assert log.waits() == []
    # casts to bf16, codes of both operands of three products, sums and casts of gradients
    assert len(kernels) <= 28, kernels
