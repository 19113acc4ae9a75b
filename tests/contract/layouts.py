"""Inputs and gradients of one layer in every dense layout: a batch of one sample, transposed, comes as columns."""

import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_lowprec import FP8TorchAO
from tests.representatives import names_on_cpu

WIDTH = 32
SHAPES = [(1, 64, WIDTH), (2, 24, WIDTH), (64, WIDTH), (1, 7, WIDTH)]
LAYERS: dict[str, Any] = {
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "Linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "Linear with a transposed weight": lambda: _with_columns(nn.Linear(WIDTH, WIDTH)),
}
NAMES = [
    "fp8-hybrid", "fp8-hybrid-fp16", "fp8-hybrid-remainder", "fp8-rowwise", "fp8-rowwise-gw-hp", "int8-mixed",
    "msamp-o1", "msamp-o2", "msamp-o3", *(name for name in names_on_cpu() if name == "mxfp8"),
]  # fmt: skip
PLUGINS: dict[str, Any] = {
    "weight_codes='per_gemm'": lambda: FP8TorchAO(weight_codes="per_gemm"),
    "grad_weight in bf16": lambda: FP8TorchAO({"*": {"grad_weight": "bf16"}}),
    "forward in bf16": lambda: FP8TorchAO({"*": {"forward": "bf16"}}),
}
"""Beside the names: options that multiply by functions of their own."""


if find_spec("transformers") is not None:  # not in the oldest supported versions
    from transformers.pytorch_utils import Conv1D

    LAYERS["Conv1D"] = lambda: Conv1D(WIDTH, WIDTH)


def _with_columns(layer: nn.Linear) -> nn.Linear:
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer


def laid_out(values: Tensor) -> Iterator[Tensor]:
    """The same values in every dense layout."""
    for order in itertools.permutations(range(values.dim())):
        back = [order.index(dim) for dim in range(values.dim())]
        yield values.permute(order).contiguous().permute(back)


def results(how: str, kind: str, *, accelerator: str = "cpu", compiled: bool = False) -> list[list[Tensor]]:
    """Output and gradients of each shape, for every layout of the input and of the gradient of the output.

    Of one shape, the first is that of contiguous tensors, and all must be equal.
    """
    torch.manual_seed(0)
    chosen = {"plugins": PLUGINS[how]()} if how in PLUGINS else {"precision": how}
    fabric = L.Fabric(accelerator=accelerator, devices=1, **chosen)
    net = nn.Sequential(LAYERS[kind]())
    fabric.setup_module(net)
    call = torch.compile(net) if compiled else net
    found = []
    for shape in SHAPES:
        x, g = torch.randn(shape, device=fabric.device), torch.randn(shape, device=fabric.device)
        for input, gradient in (*((layout, g) for layout in laid_out(x)), *((x, layout) for layout in laid_out(g))):
            net.zero_grad()
            input = input.detach().to(next(net.parameters()).dtype).requires_grad_()
            with fabric.autocast():
                out = call(input)
            out.backward(gradient.to(out.dtype))
            found.append([out.detach(), input.grad, *(p.grad.float() for p in net.parameters())])
    return found
