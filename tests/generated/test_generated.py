"""Programs that a seed draws: under every name they end as near to float32 as a control does, up to a factor of 3.

The control of a name with half-precision weights is `bf16-mixed`, for stochastic rounding `bf16-true`; that of a name
with codes computes the layers with operands that this file rounds, and moments of 8 bits are rounded to 4 bits of
mantissa. `make test-generated` draws 500 programs, not 60.
"""

import os

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.generated.programs import HALF, draw, trained

COUNT = int(os.environ.get("GENERATED", "60"))
AT_ONCE, FACTOR = 10, 3.0


class Rounded(torch.autograd.Function):
    """A Linear with operands in float8: e4m3 for input and weight, e5m2 for the gradient, a scale per tensor."""

    @staticmethod
    def forward(ctx, x, weight):
        x, weight = coded(x, torch.float8_e4m3fn), coded(weight.to(x.dtype), torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = coded(grad, torch.float8_e5m2)
        return grad @ weight, grad.flatten(0, -2).float().t() @ x.flatten(0, -2).float()


def coded(values: Tensor, dtype: torch.dtype) -> Tensor:
    scale = torch.finfo(dtype).max / values.float().abs().amax().clamp(min=1e-12)
    return ((values.float() * scale).to(dtype).float() / scale).to(values.dtype)


class RoundedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output = Rounded.apply(input.bfloat16(), self.weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)


def in_codes(net: nn.Module) -> None:
    for fqn, layer in net.named_modules():
        if type(layer) is nn.Linear and fqn != "head":
            layer.__class__ = RoundedLinear


def distance(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert ours.keys() == exact.keys()
    return float(torch.cat([(ours[name] - exact[name]).flatten() for name in exact]).norm())


def round_moments(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for value in [
        v for entry in optimizer.state.values() for v in entry.values() if v is not None and v.numel() > 4095
    ]:
        mantissa, exponent = torch.frexp(value)
        value.copy_(torch.ldexp((mantissa * 16).round() / 16, exponent))


def ratio(seed: int) -> tuple[float, str]:
    """Return how many times as far as the control a program ends from float32, and the program in words."""
    program = draw(seed)
    exact, ours = trained(program, "32-true"), trained(program, program.name)
    hook = register_optimizer_step_post_hook(round_moments) if program.name.endswith("-8bit") else None
    base = "bf16-true" if program.name.endswith("-sr") else "bf16-mixed"
    control = trained(program, base, (lambda net: None) if program.name in HALF else in_codes)
    if hook:
        hook.remove()
    return distance(ours, exact) / distance(control, exact), str(program)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_programs_end_as_near_to_float32_as_their_control(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [ratio(seed) for seed in range(first, min(first + AT_ONCE, COUNT))]
    assert not [(value, text) for value, text in found if not value <= FACTOR]
