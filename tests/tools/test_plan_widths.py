"""The number formats of every name, against what a layer does that trains under each precision.

One Linear trains for a step by AdamW, in Fabric on the CPU. Its GEMMs are watched as they run (an emulated GEMM
multiplies decoded FP8 in float32: the format that its operands were decoded from counts); the weight, the gradient, the
master and the moments are looked at afterwards.
"""

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_lowprec import names
from lightning_lowprec.conversion.name_formats import COLUMNS, LIGHTNINGS
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.fsdp2.strategy import gathers_fp8, param_dtype
from lightning_lowprec.msamp.weight_state import msamp_state_of
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.strategies import half_under_fsdp2
from lightning_lowprec.tools.doctor import availability
from tests.masters.master_loops import buffers_of
from tests.representatives import representatives
from tests.toys import Operations

CPU = torch.device("cpu")
TOKENS, IN, OUT = 32, 64, 96  # all different, so that the shape of a product tells which of the three it is
PRODUCTS = {
    "output": {(TOKENS, OUT), (OUT, TOKENS)},
    "grad_input": {(TOKENS, IN), (IN, TOKENS)},
    "grad_weight": {(OUT, IN), (IN, OUT)},
}
ATEN = torch.ops.aten
MATMULS = {ATEN.mm.default, ATEN.addmm.default, ATEN._scaled_mm.default, ATEN._int_mm.default}
SAME_NUMBERS = {
    ATEN._to_copy.default, ATEN.t.default, ATEN.transpose.int, ATEN.view.default, ATEN._unsafe_view.default,
    ATEN.detach.default, ATEN.clone.default, ATEN.slice.Tensor, ATEN.as_strided.default,
    ATEN.div.Tensor,  # by the scale: decoding
}  # fmt: skip
SHORT = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2", torch.int16: "int16", torch.uint8: "e5m3", torch.int8: "int8",
}  # fmt: skip


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(IN, OUT, bias=False), nn.LayerNorm(OUT)

    def forward(self, x):
        return self.norm(self.body(x))


def products_of(operations):
    """The formats of the operands of the three products of a Linear, by the operations of a step."""
    seen, decoded = {}, {}

    def format_of(tensor):
        codes = getattr(tensor, "_data", getattr(tensor, "qdata", tensor))  # torchao's FP8 tensors, and MXFP8's
        return decoded.get(id(tensor), codes.dtype)

    for func, args, out in operations:
        if func in SAME_NUMBERS and isinstance(args[0], Tensor) and format_of(args[0]).itemsize == 1:
            decoded[id(out)] = format_of(args[0])
        if func in MATMULS:
            product = next((name for name, shapes in PRODUCTS.items() if tuple(out.shape) in shapes), None)
            matrices = [arg for arg in args if isinstance(arg, Tensor) and arg.ndim == 2][:2]
            if product is not None:
                seen[product] = pair(*(SHORT[format_of(matrix)] for matrix in matrices))
    return seen


def trained(name):
    torch.manual_seed(0)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)
    plugin = fabric.strategy.precision
    module = Layer()
    wrapped, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    alone = samples(wrapped)
    with Operations() as operations:
        fabric.backward(wrapped(torch.randn(TOKENS, IN, requires_grad=True)).float().square().mean())
    weight = module.body.weight
    gradient = short(weight.grad)
    optimizer.step()
    state = next(entry for p, entry in optimizer.optimizer.state.items() if p.shape == weight.shape)
    state = {key.removesuffix("_codes"): value for key, value in state.items()}
    scaled = msamp_state_of(weight)
    held = (
        [scaled.codes if scaled.e4m3 is not None else None] if scaled is not None else buffers_of(optimizer.optimizer)
    )
    held = [tensor for tensor in held if tensor is None or tensor.untyped_storage().nbytes()]
    seen = dict(
        **products_of(operations.seen),
        samples=alone,
        weight=short(weight if scaled is None else scaled.for_products()[0]),
        gradient=gradient,
        master=next(map(short, held), "-"),
        moments=pair(short(state["exp_avg"]), short(state["exp_avg_sq"])),
        ddp=gradient,
        fsdp2=gathered(name, plugin, module.body),
    )
    return {column: seen[column] for column in COLUMNS}


def samples(model):
    batch = torch.randn(TOKENS, IN)
    other = torch.cat([batch[:1], 4000 * batch[1:]])
    with torch.no_grad():
        one, two = (model(x)[0].clone() for x in (batch, other))
    return "apart" if torch.equal(one, two) else "one scale"


def gathered(name, plugin, layer):
    weight = layer.weight
    if getattr(plugin, "keeps_codes", False):
        return short(weight.codes_and_scale()[0]) if plugin.shards_codes else "-"
    ours = plugin if isinstance(plugin, LowPrecision) else half_under_fsdp2(name) or plugin
    if not gathers_fp8(ours, ShardOptions()):
        return SHORT[param_dtype(ours) or weight.dtype]
    return "e4m3"


def short(tensor):
    if tensor is None:
        return "-"
    return SHORT[getattr(tensor, "codes", tensor).dtype]  # of weights and gradients that are codes


def pair(first, second):
    return first if first == second else f"{first}, {second}"


def runs(name):
    return name != "16-mixed" if name not in names.TABLE else availability(name, CPU).runs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in representatives([*LIGHTNINGS, *names.TABLE]) if runs(name)])
def test_the_table_says_what_is_seen(name):
    formats = names.TABLE[name].formats if name in names.TABLE else LIGHTNINGS[name]
    assert formats.row() == trained(name)
