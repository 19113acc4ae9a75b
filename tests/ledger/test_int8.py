"""An int8 layer on CUDA tensors: three products by torchao's kernel, few kernels around them, nothing that waits."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.ledger import roofline
from benchmarks.ledger.moved import Moved
from benchmarks.ledger.recorder import recording
from benchmarks.ledger.step import measure
from benchmarks.rivals import models
from benchmarks.rivals.contenders import find
from lightning_lowprec import Int8TorchAO

TOKENS, IN, OUT = 256, 512, 1024


TOY = replace(models.SHAPES["8b"], layers=2, hidden=256, ffn=512, heads=2, kv_heads=1, vocab=512, sequence=256)


def test_the_ledger_counts_the_kernel_as_a_product():
    """6 FLOPs per weight and token: all but the head's in int8, three products of seven layers per block.

    ``test_products_by_torchaos_kernel`` shows that the kernel is seen in compiled code as well.
    """
    found = measure("", find("ours int8-mixed").setup, TOY, compile=False)
    width = TOY.kv_heads * TOY.head_dim
    weights = 2 * TOY.hidden * (TOY.hidden + width) + 3 * TOY.hidden * TOY.ffn
    tokens = 2 * TOY.sequence
    assert found.whole().product_flops == {
        "int8": 6 * weights * TOY.layers * tokens, "bfloat16": 6 * TOY.hidden * TOY.vocab * tokens,
    }  # fmt: skip
    assert found.per_block("products") == 21
    roofline.predict(found, roofline.assumed())


def step(module, x):
    with torch.autocast("cuda", torch.bfloat16):
        output = module(x)
    output.sum().backward()


OPTIONS = {
    "int8": ({}, 3),
    "two-gemms": ({"recipe": {"*": {"grad_weight": "bf16"}}}, 2),
    "stochastic": ({"stochastic_rounding": True}, 3),
}


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *(pytest.param(name, False, id=f"{name}-eager") for name in OPTIONS),
        pytest.param("int8", True, id="int8-compiled", marks=pytest.mark.rehearsed),
        pytest.param("two-gemms", True, id="two-gemms-compiled", marks=pytest.mark.rehearsed),
        pytest.param("stochastic", True, id="stochastic-compiled"),  # with random numbers, and all that the others do
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
