"""Models, a LightningModule and options of a Trainer for many tests; a test whose point is its model has its own.

Modules are made in the order in which they run, after `torch.manual_seed(seed)` where a seed is given.
"""

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
ON_CPU = {**QUIET, "accelerator": "cpu"}


class Block(nn.Module):
    """``x + down(activation(up(norm(x))))``: [*, width] -> [*, width]."""

    def __init__(self, width: int = 32, *, norm: bool = True, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Residual(nn.Sequential):
    """``x + layers(x)``, with names that are numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def gelu_block(width: int = 32, norm: bool = True) -> Residual:
    """Return what `Block` is, as a `Residual`."""
    norms = [nn.LayerNorm(width)] if norm else []
    return Residual(*norms, nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Stack(nn.Module):
    """Blocks one after the other; ``head``: the name and the two sizes of a Linear behind them."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = Block,
        depth: int = 2,
        head: tuple[str, int, int] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.blocks = nn.ModuleList(make() for _ in range(depth))
        self.head_name = head and head[0]
        if head:
            self.add_module(head[0], nn.Linear(*head[1:]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return getattr(self, self.head_name)(x) if self.head_name else x


def mean_square(net: nn.Module, batch: Tensor) -> Tensor:
    """Return a loss for a batch without targets."""
    return net(batch).float().square().mean()


def causal_loss(net: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of a language model of transformers."""
    return net(input_ids=tokens, labels=tokens).loss


def stepped(fabric: L.Fabric, optimizer: Any, losses: Iterable[Tensor]) -> list[float]:
    """Step once for each loss, which is computed when it is asked for; return the values."""
    values = []
    for loss in losses:
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def adamw(module: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    """Return AdamW over what is trained."""
    return torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=lr)


class Task(L.LightningModule):
    """Trains ``net`` on ``loss(net, batch)``, and keeps the losses."""

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor] = mean_square,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    ) -> None:
        super().__init__()
        self.net, self.loss, self.optimizer = net, loss, optimizer
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        loss = self.loss(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self)


class Operations(TorchDispatchMode):
    """Keeps the operations that run inside, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen.append((func, args, out))
        return out


def in_e4m3(values: Tensor) -> Tensor:
    """The values of e4m3 codes with a scale for all, the largest power of two that keeps them below 448."""
    scale = (448 / values.abs().amax()).log2().floor().exp2()
    return (values * scale).to(torch.float8_e4m3fn).float() / scale


def convert(plugin: Any, model: nn.Module, device: torch.device | str = "cpu") -> Any:
    """Set a model up as Trainer and Fabric do on this device, without them."""
    plugin.bind_device(torch.device(device))
    return plugin.convert_module(model)


def on_gpu(monkeypatch: Any, capability: tuple[int, int], gcn: str | None = None) -> torch.device:
    """Let torch say what a GPU is called and what it can do, which is all that decides; ``gcn``: ROCm's name of it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GPU X")
    if gcn is not None:
        properties = type("Properties", (), {"gcnArchName": gcn})()
        monkeypatch.setattr(torch.version, "hip", "7.1")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    return torch.device("cuda", 0)
