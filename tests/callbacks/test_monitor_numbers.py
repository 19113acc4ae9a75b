"""The numbers of a sampling are those of the casts of torchao and MS-AMP, computed here from captured tensors."""

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
from lightning_lowprec.msamp import values_of
from lightning_lowprec.numerics.casts import cut_off_above, zero_below

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Captured(nn.Module):
    """Two layers, with what the first one got and gave."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(64, 96), nn.Linear(96, 16)
        with torch.no_grad():
            self.layer.weight.mul_(torch.exp(4 * torch.randn_like(self.layer.weight)))

    def forward(self, x):
        self.input = x
        self.output = self.layer(x)
        if self.output.requires_grad:
            self.output.retain_grad()
        return self.last(self.output * torch.exp(8 * torch.tanh(x[..., :1] / 4)))


def sampled(plugin, step=0, **options):
    torch.manual_seed(1)
    fabric = L.Fabric(accelerator="cpu", plugins=plugin)
    model = Captured()
    wrapped, _ = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    monitor = NumericsMonitor(every=1, **options)
    monitor.step(wrapped, step)
    x = torch.randn(4, 32, 64) * torch.exp(3 * torch.randn(4, 32, 64))
    fabric.backward(wrapped(x).float().square().mean())
    weight = model.layer.weight.detach()
    if isinstance(plugin, MSAMP):
        weight = values_of(weight)
    weight = weight.clone()
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
    "rowwise": (lambda: FP8TorchAO("rowwise"), codes_of, E4M3, True, True),
    "rowwise_with_gw_hp": (lambda: FP8TorchAO("rowwise_with_gw_hp"), codes_of, E4M3, True, True),
    "msamp-o2": (lambda: MSAMP("O2"), msamp_codes, E5M2, False, True),
    "msamp-o3": (lambda: MSAMP("O3"), msamp_codes, E5M2, False, True),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_numbers_are_those_of_the_casts(recipe):
    plugin, encode, gradients, by_row, power_of_2 = RECIPES[recipe]
    model, weight, readings = sampled(plugin(), rows=1.0)
    rows = model.input.reshape(-1, 64).bfloat16()
    gradient = model.output.grad.reshape(-1, 96)
    seen = {"input": (rows, E4M3), "weight": (weight, E4M3), "gradient": (gradient, gradients)}
    shares = {}
    for tensor, (x, dtype) in seen.items():
        codes, scale = encode(x, dtype, bool(by_row), power_of_2)
        reading = readings[tensor]
        assert reading.amax == float(x.float().abs().max())
        assert reading.scale == pytest.approx(float(scale.min()), rel=1e-6)
        lost = (codes.float() == 0) & (x != 0)
        shares[tensor] = reading.underflow
        assert reading.underflow == pytest.approx(int(lost.sum()) / int((x != 0).sum()), abs=1e-9)
        assert reading.saturated == 0
    if not by_row:
        assert min(shares.values()) > 0.01, "the case must have values that become 0"
    exact = rows @ weight.bfloat16().t()
    error = model.output.detach().reshape(-1, 96).float() - exact.float() - model.layer.bias.detach().bfloat16().float()
    db = 10 * math.log10(float(exact.float().square().sum()) / float(error.square().sum()))
    assert {round(r.output_db, 3) for r in readings.values()} == {round(db, 3)}
    assert 15 < db < 45


@pytest.mark.parametrize("step", [0, 5])
def test_a_sample_counts_every_sixteenth_row(step):
    """From another row at each sampling; scales and largest values are those of all rows."""
    model, weight, readings = sampled(FP8TorchAO(), step=step)
    rows = model.input.reshape(-1, 64).bfloat16()
    for tensor, x in {"input": rows, "weight": weight}.items():
        codes, scale = codes_of(x, E4M3, False, False)
        codes, part = codes[step::16].float(), x[step::16]
        assert readings[tensor].underflow == pytest.approx(
            float(((codes == 0) & (part != 0)).sum() / (part != 0).sum())
        )
        assert readings[tensor].amax == float(x.float().abs().max())
        assert readings[tensor].scale == pytest.approx(float(scale))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_limits_are_those_of_the_cast(dtype):
    """Of all float32 numbers near the limits, those that torch casts to 0, and those beyond the largest number."""
    zero, top = zero_below(dtype), cut_off_above(dtype)
    assert torch.tensor([zero, zero * 1.0001]).to(dtype).float().gt(0).tolist() == [False, True]
    largest = torch.finfo(dtype).max
    step = largest - float(torch.tensor(largest * 0.9).to(dtype).float().nextafter(torch.tensor(0.0)))
    assert largest < top < largest + step
    assert top == {E4M3: 464.0, E5M2: 61440.0}[dtype]  # the middle between the largest number and the next
