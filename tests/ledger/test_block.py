"""Codes with a scale per block on CUDA tensors: cuBLASLt multiplies on Hopper, torchao's Triton kernels elsewhere."""

import pytest
import torch
from torch import nn

from benchmarks.ledger.recorder import recording
from lightning_lowprec import FP8TorchAO
from lightning_lowprec.products import block


@pytest.mark.parametrize("by_cublas", [True, False], ids=["cublas", "triton"])
def test_three_products_of_codes(by_cublas, monkeypatch):
    """The null GPU is an H200; what another GPU runs is seen by an answer that only other GPUs give."""
    if not by_cublas:
        monkeypatch.setattr(block, "by_cublas", lambda device: False)
    assert block.by_cublas(torch.device("cuda")) == by_cublas
    tokens, inputs, outputs = 48, 272, 144  # no multiples of 128
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=False)).cuda()
    plugin = FP8TorchAO("block", compile=False)
    plugin.bind_device(torch.device("cuda"))
    plugin.convert_module(model)
    x = torch.randn(tokens, inputs, device="cuda", requires_grad=True)
    for _ in range(2):  # the first step compiles
        with recording() as log:
            with torch.autocast("cuda", torch.bfloat16):
                output = model(x)
            output.sum().backward()
    products = [record.info for record in log.of("gemm")]
    kernels = [record.name for record in log.of("kernel") if record.name.startswith("triton_fp8_gemm")]
    with recording() as outside:
        assert model(x).dtype == torch.float32
    assert ["c=float32" in record.info for record in outside.of("gemm")] == [True] * by_cublas
    if by_cublas:
        # cuBLASLt's modes of scales: 5 is 128 x 128 values of the weight, 4 is 128 values of a row
        assert [info.split("scales=")[1].split()[0] for info in products] == ["5,4", "5,4", "4,4"]
        assert all("a=float8_e4m3fn b=float8_e4m3fn c=bfloat16" in info for info in products)
        assert not kernels
    else:
        assert not products
        by_tile = "triton_fp8_gemm_1x128_128x128_kernel"
        assert kernels == [by_tile, by_tile, "triton_fp8_gemm_1x128_128x1_kernel"]
    assert not log.waits()


@pytest.mark.parametrize("by_cublas", [True, False], ids=["cublas", "triton"])
def test_products_of_ragged_sizes_compile(by_cublas, monkeypatch):
    """torch's rules for compiled products of blocks ask for multiples of 128; its code for Triton's lacks an import."""
    monkeypatch.setattr(block, "by_cublas", lambda device: by_cublas)
    model = nn.Linear(272, 144, bias=False).cuda()
    plugin = FP8TorchAO("block", compile=False)
    plugin.bind_device(torch.device("cuda"))
    plugin.convert_module(nn.Sequential(model))
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(48, 272, device="cuda", requires_grad=True)
    with recording() as log, torch.autocast("cuda", torch.bfloat16):
        compiled(x).sum().backward()
    kernels = [record for record in log.of("kernel") if record.name.startswith("triton_fp8_gemm")]
    assert (len(log.of("gemm")), len(kernels)) == ((3, 0) if by_cublas else (0, 3))


@pytest.mark.parametrize("autocast", [True, pytest.param(False, marks=pytest.mark.rehearsed)])
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_layers_of_all_shapes_share_a_few_graphs(autocast):
    """Beyond torch's limit of eight graphs the codes would be made by many kernels, in silence."""
    plugin = FP8TorchAO("block", compile=False)
    plugin.bind_device(torch.device("cuda"))
    sizes = [(272, 144), (256, 256), (512, 256), (128, 384), (144, 272)]
    model = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes).cuda()
    plugin.convert_module(model)
    for tokens in (48, 128, 256):
        for layer, (inputs, _) in zip(model, sizes, strict=True):
            x = torch.randn(tokens, inputs, device="cuda", requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                output = layer(x)
            output.sum().backward()
