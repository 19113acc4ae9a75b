"""What a training loop's optimizer is given, against the same micro-batch gradients summed in float64."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec import HalfMixed
from lightning_lowprec.precision.loss_scale import LossScale

FLOAT32 = {"grad_accumulation_dtype": torch.float32}
FORMS = {"bf16-master": True, "bf16-remainder": "remainder", "bf16-sr": "stochastic", "fp16-master": True}


def plugin(form: str, **options: Any) -> HalfMixed:
    """A plugin with masters of a form; fp16 starts at a loss scale at which nothing overflows."""
    base = form[:4]
    scale = {"loss_scale": LossScale(initial=8.0)} if base == "fp16" else {}
    return HalfMixed(base, master_weights=FORMS[form], **scale, **options)


class Recording(torch.optim.SGD):
    """Keeps the gradients of every step it takes; the learning rate is 0, so the weights stay."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.0)
        self.given: list[list[Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        result = None if closure is None else closure()
        self.given.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        return result


class Net(L.LightningModule):
    """Linears in half precision after a BatchNorm in float32; trained automatically."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return loss_of(self(batch), batch)

    def configure_optimizers(self) -> Recording:
        self.recording = Recording(self.parameters())
        return self.recording


def loss_of(output: Tensor, batch: Tensor) -> Tensor:
    return F.mse_loss(output.float(), batch[:, :8].float())


def batches(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # numbers that fp16 and bf16 have: whoever casts a batch changes nothing
    return [torch.randn(8, 16, generator=generator).bfloat16().half().float() for _ in range(count)]


def exact_sum(micro_batches: list[Tensor], dtype: torch.dtype, scale: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """By plain torch: per parameter the float64 sum of the gradients of ``scale * loss / n``, and of their magnitudes.

    Each is computed as ``dtype`` weights under autocast compute it, and divided by ``scale``.
    """
    net = Net()
    for layer in (net.layers[1], net.layers[3]):
        layer.to(dtype)
    params = list(net.parameters())
    sums = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
    magnitudes = [torch.zeros_like(total) for total in sums]
    for batch in micro_batches:
        with torch.autocast("cpu", dtype=dtype):
            loss = net.training_step(batch.to(dtype)) / len(micro_batches)
        for total, magnitude, grad in zip(sums, magnitudes, torch.autograd.grad(loss * scale, params), strict=True):
            total += grad.double() / scale
            magnitude += grad.double().abs() / scale
    return sums, magnitudes


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def relative_error(given: list[Tensor], exact: list[Tensor]) -> float:
    return ((flat(given) - flat(exact)).norm() / flat(exact).norm()).item()


def float32_bound(exact: list[Tensor], magnitudes: list[Tensor], terms: int) -> float:
    """What recursive summation in float32 can lose at most, relative to the sum (Higham, sec. 4.2)."""
    return (terms * 2.0**-24 * flat(magnitudes).norm() / flat(exact).norm()).item()
