"""A small model whose runs can be compared bit for bit, and the exact weights that a run leaves."""

import lightning as L
import torch
from torch import nn

from lightning_lowprec import plain
from tests.toys import ON_CPU

WIDTH = 64  # weights of 4,096 numbers: moments of 8 bits are coded


class Net(L.LightningModule):
    """Two Linears that convert, a LayerNorm, and a head that does not; the head may be frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, frozen_head: bool = False, early_optimizer: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.head.requires_grad_(not frozen_head)
        self.to(dtype)
        self.losses: list[float] = []
        self.batch_size, self.lr = 8, 1e-2
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr) if early_optimizer else None

    def forward(self, x):
        return self.head(self.norm(self.second(self.first(x).relu())))

    def training_step(self, batch, _):
        loss = (self(batch).float() - 1).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        self.log("loss", (self(batch).float() - 1).square().mean())

    test_step = validation_step

    def train_dataloader(self):
        inputs = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(inputs, batch_size=self.batch_size)

    val_dataloader = test_dataloader = train_dataloader

    def configure_optimizers(self):
        return self.optimizer or torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self.lr)


def fit(how, module, *, ckpt_path=None, **options):
    """Train for 3 steps under a name or a plugin; return the Trainer, which keeps the optimizer alive."""
    named = {"precision": how} if isinstance(how, str) else {"plugins": how}
    trainer = L.Trainer(**named, **{**ON_CPU, "max_epochs": 1, "limit_val_batches": 0, **options})
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def as_trained(how):
    """Return the plugin of a name, or a plugin, that leaves the layers, weights and optimizers of the run behind."""
    plugin = L.Fabric(accelerator="cpu", precision=how).strategy.precision if isinstance(how, str) else how
    plugin.plain_after_fit = False
    return plugin


def exact_weights(module):
    """Return the float32 weights of a model by name, with the values of the masters where there are any."""
    return {fqn: p.detach().float() for fqn, p in plain(module, copy=True).named_parameters()}


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


BY_LIGHTNING, BY_TORCH = {"_hparams"}, {"_dynamo_static_input_type"}


def seen(model):
    """Everything that a precision might leave at a model: classes, attributes, hooks; of Parameters also dtypes."""
    modules = {
        fqn: (type(m), vars(m).keys() - BY_LIGHTNING, {k: len(v) for k, v in vars(m).items() if k.endswith("_hooks")})
        for fqn, m in model.named_modules()
    }
    tensors = {
        fqn: (
            type(p),
            type(p.data),
            p.dtype,
            p.grad_dtype,
            p.requires_grad,
            vars(p).keys() - BY_TORCH,
            bool(p._backward_hooks),
        )
        for fqn, p in model.named_parameters(remove_duplicate=False)
    }
    return modules, tensors
