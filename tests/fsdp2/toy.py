"""A small model whose head has five rows (uneven shards), its training, and everything that a checkpoint must keep."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_lowprec import FabricFSDP2Strategy
from tests.toys import Block, stepped

WIDTH = 32
X = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 5, (64,), generator=torch.Generator().manual_seed(2))
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Toy(L.LightningModule):
    def __init__(self, seed: int = 0, width: int = WIDTH, make=None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.make = make or adamw
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.register_buffer("seen", torch.zeros(3))
        self.head = nn.Linear(width, 5)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x).float(), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = self.make(self)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": decayed}], lr=1e-2)


def fabric_for(precision, ranks: int = 1, **options) -> L.Fabric:
    """Return a Fabric that is launched, for a name or a plugin."""
    words = {"precision": precision} if isinstance(precision, str) else {"plugins": precision}
    fabric = L.Fabric(accelerator="cpu", devices=ranks, **words, **options)
    fabric.launch()
    return fabric


def setup(
    precision, ranks: int, seed: int = 0, kind: str = "sharded", make=adamw, width: int = WIDTH, net=Toy, **options
):
    fabric = fabric_for(precision, ranks, strategy=FabricFSDP2Strategy(state_dict_type=kind, **options))
    model = net(seed) if net is not Toy else Toy(seed, width)
    model, optimizer = fabric.setup(model, make(model))
    return fabric, model, optimizer


def train(fabric, model, optimizer, steps: range, ranks: int) -> list[float]:
    rows = (torch.arange(8) + 8 * ((step * ranks + fabric.global_rank) % 8) for step in steps)
    return stepped(fabric, optimizer, (F.cross_entropy(model(X[row]).float(), Y[row]) for row in rows))


SENT_AS = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.int16: torch.float16}
"""gloo does not gather the former."""


def full(value):
    """Return whole tensors in the place of shards; codes of float8 as bytes."""
    if isinstance(value, Tensor):
        value, dtype = value.detach(), value.dtype
        if isinstance(value, DTensor) and dtype in SENT_AS:
            layout = {"shape": value.shape, "stride": value.stride(), "run_check": False}
            local = value.to_local().view(SENT_AS[dtype])
            value = DTensor.from_local(local, value.device_mesh, value.placements, **layout)
        value = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        return value.view(torch.int16 if dtype == torch.int16 else torch.uint8) if dtype in SENT_AS else value
    if isinstance(value, dict):
        return {key: full(v) for key, v in value.items()}
    return [full(v) for v in value] if isinstance(value, (list, tuple)) else value


def everything(model: nn.Module, optimizer, plugin) -> dict:
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return {
        "model": full(dict(model.state_dict())),
        "optimizer": full(optimizer.state_dict()),
        "precision": plugin.state_dict(),
    }


def assert_same(a, b, name: str) -> None:
    found = differences(a, b)
    assert not found, f"{name}: {found[:5]}"


def differences(a, b, at: str = "") -> list[str]:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        return [] if same else [f"{at}: {a.dtype} {tuple(a.shape)} {b.dtype} {tuple(b.shape)}"]
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [f"{at}: keys {a.keys() ^ b.keys()}"] if a.keys() != b.keys() else []
        return keys + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{at}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{at}[{i}]")]
    return [] if a == b else [f"{at}: {a!r} {b!r}"]
