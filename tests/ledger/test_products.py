"""Products of a layer on CUDA tensors: whose kernels they are, few kernels around them, nothing that waits."""

import pytest
import torch
from torch import nn

from benchmarks.ledger.moved import Moved
from benchmarks.ledger.recorder import recording
from lightning_lowprec import FP8TorchAO, Int8TorchAO
from tests.contract.layouts import LAYERS, NAMES, PLUGINS, results
from tests.torchao.test_recipe_per_layer import FAST
from tests.toys import convert


def layer(plugin, inputs, outputs):
    return convert(plugin, nn.Sequential(nn.Linear(inputs, outputs, bias=False)).cuda(), "cuda")


def step(module, x):
    with torch.autocast("cuda", torch.bfloat16):
        output = module(x)
    output.sum().backward()


@pytest.fixture(params=[True, False], ids=["cublas", "triton"])
def by_cublas(request, monkeypatch):
    """The null GPU is an H200; what another GPU runs is seen by an answer that only other GPUs give."""
    if not request.param:
        monkeypatch.setattr("lightning_lowprec.products.block.by_cublas", lambda device: False)
    return request.param


def test_three_products_of_blocks(by_cublas):
    model = layer(FP8TorchAO("block", compile=False), 272, 144)  # no multiples of 128
    x = torch.randn(48, 272, device="cuda", requires_grad=True)
    for _ in range(2):  # the first step compiles
        with recording() as log:
            step(model, x)
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


def test_products_of_blocks_of_ragged_sizes_compile(by_cublas):
    """torch's rules for compiled products of blocks ask for multiples of 128; its code for Triton's lacks an import."""
    compiled = torch.compile(layer(FP8TorchAO("block", compile=False), 272, 144), fullgraph=True)
    with recording() as log:
        step(compiled, torch.randn(48, 272, device="cuda", requires_grad=True))
    kernels = [record for record in log.of("kernel") if record.name.startswith("triton_fp8_gemm")]
    assert (len(log.of("gemm")), len(kernels)) == ((3, 0) if by_cublas else (0, 3))


@pytest.mark.parametrize("autocast", [True, pytest.param(False, marks=pytest.mark.rehearsed)])
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_layers_of_all_shapes_share_a_few_graphs(autocast):
    """Beyond torch's limit of eight graphs the codes would be made by many kernels, in silence."""
    sizes = [(272, 144), (256, 256), (512, 256), (128, 384), (144, 272)]
    model = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes).cuda()
    convert(FP8TorchAO("block", compile=False), model, "cuda")
    for tokens in (48, 128, 256):
        for linear, (inputs, _) in zip(model, sizes, strict=True):
            x = torch.randn(tokens, inputs, device="cuda", requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                output = linear(x)
            output.sum().backward()


@pytest.mark.parametrize("choice", FAST)
def test_the_choice_of_accumulation_reaches_the_kernels_of_a_gpu(choice):
    model = convert(FP8TorchAO(fast_accum=choice, compile=False), nn.Sequential(nn.Linear(64, 128)).cuda(), "cuda")
    with recording() as log:
        step(model, torch.randn(32, 64, device="cuda", requires_grad=True))
    assert [bool(record.number("fast")) for record in log.of("gemm")] == FAST[choice]


OPTIONS = {"int8": ({}, 3), "two-gemms": ({"recipe": {"*": {"grad_weight": "bf16"}}}, 2)}


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in OPTIONS),
        ("int8", True),
        pytest.param("two-gemms", True, marks=pytest.mark.rehearsed),
    ],
)
def test_products_of_int8_by_torchaos_kernel(name, compiled):
    options, products = OPTIONS[name]
    model = layer(Int8TorchAO(compile=False, **options), 512, 1024)
    module = torch.compile(model) if compiled else model
    x = torch.randn(256, 512, device="cuda", requires_grad=True)
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


# ---- operands of every dense layout


ON_HOPPER = [name for name in NAMES if name != "mxfp8"]
AS_ANOTHER = {
    "fp8-hybrid-fp16": "fp8-hybrid", "fp8-hybrid-remainder": "fp8-hybrid", "msamp-o1": "msamp-o2",
    "msamp-o3": "msamp-o2", "grad_weight in bf16": "fp8-rowwise-gw-hp", "forward in bf16": "fp8-rowwise-gw-hp",
}  # fmt: skip
"""What has the operands of the other one: `make test-ledger` shows it with one kind of layer."""


def all_of_both():
    for how in (*ON_HOPPER, *PLUGINS):
        for kind in LAYERS:
            rehearsed = how in AS_ANOTHER and kind != "Linear"
            yield pytest.param(how, kind, marks=pytest.mark.rehearsed if rehearsed else ())


@pytest.mark.parametrize(("how", "kind"), list(all_of_both()))
def test_every_layout(how, kind):
    results(how, kind, accelerator="gpu")


@pytest.mark.parametrize(
    "how", ["fp8-hybrid", "msamp-o2", "int8-mixed", pytest.param("fp8-rowwise", marks=pytest.mark.rehearsed)]
)
def test_every_layout_compiled(how):
    results(how, "Linear", accelerator="gpu", compiled=True)
