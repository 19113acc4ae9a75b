"""Modules, data and runners of the contract suite.

``Probe`` has a loss that is linear in ``w``, so that its gradient is the batch, exactly, in every precision. With SGD
and a learning rate of 1, ``w`` after a run is minus the sum of what the optimizer was given.
"""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec.msamp import values_of
from lightning_lowprec.msamp.weight import codes_of
from lightning_lowprec.msamp.weight_state import msamp_state_of

X = torch.tensor([3.0, 4.0])
"""A batch, and the gradient it causes: norm 5, exact in fp16, bf16 and float32."""
OVERFLOW = torch.tensor([float("inf"), 4.0])
"""A batch whose gradient is not finite."""


def value(parameter: Tensor) -> Tensor:
    """A copy of what a parameter is worth, which may hold codes with a scale."""
    return parameter.detach().clone() if msamp_state_of(parameter) is None else values_of(parameter)


def same(actual: Tensor, expected: Tensor, rtol: float = 0.0) -> bool:
    """Equal; half-precision weights stand for float32 masters, so they may be off by the rounding of one step.

    Weights kept as codes may be off by the rounding to these.
    """
    if msamp_state_of(actual) is not None:
        rtol = max(rtol, torch.finfo(codes_of(actual).dtype).eps)
        actual = value(actual)
    if actual.dtype == expected.dtype and rtol == 0.0:
        return torch.equal(actual, expected)
    if actual.dtype != expected.dtype:
        rtol = max(rtol, torch.finfo(actual.dtype).eps)
    return bool(((actual.float() - expected.float()).abs() <= rtol * expected.float().abs()).all())


def assert_same(actual: Tensor, expected: Tensor, rtol: float, atol: float) -> None:
    """``torch.testing.assert_close``, for weights that may be half precision too."""
    assert atol == 0
    assert same(actual, expected, rtol), f"{actual} is not {expected}"


class Batches:
    """An iterable of batches; unlike a DataLoader it makes Lightning advise nothing."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class CountingSGD(torch.optim.SGD):
    """SGD with a learning rate of 1 that notes the keyword arguments of every step it takes."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.calls: list[dict[str, Any]] = []

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        return super().step(closure)


class Probe(L.LightningModule):
    """``loss = w . x``; the Linear takes no part in the loss, it is there to be converted, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32).requires_grad_(False)
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor | None:
        return self(batch)

    def configure_optimizers(self) -> Any:
        self.optimizer = CountingSGD(self.parameters())
        return self.optimizer


class Net(L.LightningModule):
    """A small network whose layers convert, with AdamW and moments that can have 8 bits; keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 32))
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        loss = F.mse_loss(self(batch).float(), batch.float().flip(-1))
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class EvaluatedNet(Net):
    """A Net that can be validated, tested and asked for predictions."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self(batch).float(), batch.flip(-1)))

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)


def net(cls: type[Net] = Net) -> Net:
    """A Net with the same weights each time."""
    torch.manual_seed(0)
    return cls()


def random_batches(count: int) -> Batches:
    """The same ``count`` batches each time, (8, 32)."""
    generator = torch.Generator().manual_seed(1)
    return Batches(*(torch.randn(8, 32, generator=generator) for _ in range(count)))


def trainer_with(plugin: Any, **options: Any) -> L.Trainer:
    """A quiet Trainer on one CPU; ``plugin`` is a plugin or one of Lightning's own precision names."""
    precision: dict[str, Any] = {"precision": plugin} if isinstance(plugin, str) else {"plugins": [plugin]}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "devices": 1, "max_epochs": 1}
    return L.Trainer(**precision, **(quiet | options))


def fabric_with(plugin: Any) -> L.Fabric:
    """Fabric on one CPU; ``plugin`` is a plugin or one of Lightning's own precision names."""
    precision: dict[str, Any] = {"precision": plugin} if isinstance(plugin, str) else {"plugins": [plugin]}
    return L.Fabric(accelerator="cpu", devices=1, **precision)


def fabric_probe(plugin: Any) -> tuple[L.Fabric, Any, Any, Probe, CountingSGD]:
    """Fabric with a Probe set up: fabric, wrapped module, wrapped optimizer, and the two unwrapped."""
    fabric, probe = fabric_with(plugin), Probe()
    raw = CountingSGD(probe.parameters())
    module, optimizer = fabric.setup(probe, raw)
    return fabric, module, optimizer, probe, raw


def train_in_fabric(fabric: L.Fabric, module: Any, optimizer: Any, batches: Batches) -> list[float]:
    """The usual loop; the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(module(batch), batch.flip(-1))
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def scale_of(plugin: Any) -> float:
    """What the plugin multiplies a loss with now; gradients that a test assigns are those of such a loss."""
    return 1.0 if plugin.scaler is None else plugin.scaler.scale_loss(torch.ones(())).item()


def assert_same_tensors(a: Any, b: Any) -> None:
    """Two nested states are equal, tensors bit for bit, dtypes and keys included."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_tensors(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_tensors(x, y)
    else:
        assert a == b
