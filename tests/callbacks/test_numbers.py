"""The numbers of a monitor are those of the casts of torchao and MS-AMP, computed here from captured tensors."""

import math

import lightning as L
import pytest
import torch
from torch import nn
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig

from lightning_lowprec import MSAMP, FP8TorchAO
from lightning_lowprec.callbacks import NumericsMonitor
from lightning_lowprec.callbacks.sampling import _reading
from lightning_lowprec.msamp import values_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Captured(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(64, 96), nn.Linear(96, 16)
        with torch.no_grad():
            self.layer.weight.mul_(torch.exp(4 * torch.randn_like(self.layer.weight)))

    def forward(self, x):
        self.input = x = x.float() * 1.0001  # as behind a norm: no longer numbers of bf16
        self.output = self.layer(x)
        if self.output.requires_grad:
            self.output.retain_grad()
        return self.last(self.output * torch.exp(8 * torch.tanh(x[..., :1] / 4)))


def sampled(plugin, step=0, **options):
    torch.manual_seed(1)
    fabric = L.Fabric(accelerator="cpu", plugins=plugin)
    model = Captured()
    if getattr(plugin.layers, "frozen", "") == "codes":
        model.layer.weight.requires_grad = False
        codes, scale = codes_of(model.layer.weight.detach(), E4M3, False, False)
        decoded = codes.float() / scale
    wrapped, _ = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    monitor = NumericsMonitor(**{"every": 1, **options})
    monitor.step(wrapped, step)
    x = torch.randn(4, 32, 64) * torch.exp(3 * torch.randn(4, 32, 64))
    fabric.backward(wrapped(x).float().square().mean())
    weight = model.layer.weight.detach()
    weight = values_of(weight) if isinstance(plugin, MSAMP) else weight.clone()
    weight = weight if model.layer.weight.requires_grad else decoded
    readings = {r.tensor: r for r in monitor.finish() if r.fqn == "layer"}
    return model, weight, readings


def codes_of(x, dtype, by_row, power_of_2):
    """Codes and scales by torchao, for a tensor with one scale or with one per row."""
    granularity = ScalingGranularity.AXISWISE if by_row else ScalingGranularity.TENSORWISE
    made = hp_tensor_to_float8_dynamic(
        x, dtype, LinearMMConfig(), gemm_input_role=GemmInputRole.INPUT, scaling_granularity=granularity,
        axiswise_dim=-1 if by_row else None, round_scales_to_power_of_2=power_of_2,
    )  # fmt: skip
    return made._data, made._scale


def msamp_codes(x, dtype, *_):
    """One power of two, the largest that keeps the tensor within the format."""
    scale = torch.tensor(2.0 ** math.floor(math.log2(torch.finfo(dtype).max / float(x.abs().max()))))
    return (x.float() * scale).to(dtype), scale


RECIPES = {
    "tensorwise": (lambda: FP8TorchAO(), codes_of, E5M2, False, False),
    "e4m3": (lambda: FP8TorchAO(fp8_format="e4m3"), codes_of, E4M3, False, False),
    "per_gemm": (lambda: FP8TorchAO(weight_codes="per_gemm", round_scales_to_power_of_2=True), codes_of, E5M2, 0, True),
    "frozen": (lambda: FP8TorchAO(frozen="codes"), codes_of, E5M2, False, False),
    "rowwise": (lambda: FP8TorchAO("rowwise"), codes_of, E4M3, True, True),
    "rowwise_with_gw_hp": (lambda: FP8TorchAO("rowwise_with_gw_hp"), codes_of, E4M3, True, True),
    "msamp-o2": (lambda: MSAMP("O2"), msamp_codes, E5M2, False, True),
    "msamp-o3": (lambda: MSAMP("O3"), msamp_codes, E5M2, False, True),
}

CASES = {recipe: (recipe, 0, {"rows": 1.0}, slice(None)) for recipe in RECIPES}
"""By recipe: of all rows. The others begin at another row at each sampling."""
CASES |= {str(step): ("tensorwise", step, {}, slice(step, None, 16)) for step in (0, 5)}
CASES |= {"10": ("rowwise", 10, {"every": 2, "rows": 1 / 4}, slice(5 % 4, None, 4))}


@pytest.mark.parametrize(("recipe", "step", "options", "seen"), CASES.values(), ids=CASES)
def test_the_numbers_are_those_of_the_casts(recipe, step, options, seen):
    """Largest values, and the scale of a tensor, are those of all rows."""
    plugin, encode, gradients, by_row, power_of_2 = RECIPES[recipe]
    model, weight, readings = sampled(plugin(), step=step, **options)
    rows = model.input.reshape(-1, 64).bfloat16()
    gradient = model.output.grad.reshape(-1, 96)
    shares = {}
    for tensor, x, dtype in (("input", rows, E4M3), ("weight", weight, E4M3), ("gradient", gradient, gradients)):
        codes, scale = encode(x, dtype, bool(by_row), power_of_2)
        codes, scale = codes[seen], scale[seen] if by_row else scale
        reading = readings[tensor]
        assert reading.amax == float(x.float().abs().max())
        assert reading.scale == pytest.approx(float(scale.min()), rel=1e-6)
        lost = (codes.float() == 0) & (x[seen] != 0)
        shares[tensor] = reading.underflow
        assert reading.underflow == pytest.approx(int(lost.sum()) / int((x[seen] != 0).sum()), abs=1e-9)
    if not by_row:
        of_codes = shares.pop("weight") if recipe == "frozen" else 0
        assert of_codes == 0, "no value of a code becomes another"
        assert min(shares.values()) > 0.01, "the case must have values that become 0"
    exact = (rows[seen] @ weight.bfloat16().t()).float()
    error = model.output.detach().reshape(-1, 96)[seen].float() - exact - model.layer.bias.detach().bfloat16().float()
    db = 10 * math.log10(float(exact.square().sum()) / float(error.square().sum()))
    assert {round(r.output_db, 3) for r in readings.values()} == {round(db, 3)}
    assert 15 < db < 45


def test_ranks_of_several_scales_show_the_smallest_and_a_rank_without_tokens_shows_none():
    first, second, idle = [2.0, 64.0], [8.0, 16.0], [0.0, 0.0]  # amax and scale of each rank
    reading = _reading([0.0, 0.0, 100.0, 75.0], torch.tensor([first, second, idle]))
    assert reading == {"amax": 8.0, "underflow": 0.25, "scale": 16.0}
