"""A small model whose runs can be compared bit for bit, and the exact weights that a run leaves."""

import lightning as L
import torch
from torch import nn

from lightning_lowprec.masters.registry import existing_masters
from lightning_lowprec.msamp.weight import values_of
from lightning_lowprec.msamp.weight_state import msamp_state_of
from lightning_lowprec.names import create
from tests.toys import ON_CPU


class Net(L.LightningModule):
    """Two Linears that convert, a LayerNorm, and a head that does not; the head may be frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, frozen_head: bool = False, early_optimizer: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.head = nn.Linear(32, 4)
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
        inputs = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(inputs, batch_size=self.batch_size)

    val_dataloader = train_dataloader

    def configure_optimizers(self):
        return self.optimizer or torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self.lr)


def as_trained(how):
    """Return the plugin of a name, or a plugin, that leaves the layers, weights and optimizers of the run behind."""
    plugin = create(how) if isinstance(how, str) else how
    plugin.plain_after_fit = False
    return plugin


def fit(how, module, *, ckpt_path=None, **options):
    """Train for 3 steps under a name or a plugin; return the Trainer, which keeps the optimizer alive."""
    named = {"precision": how} if isinstance(how, str) else {"plugins": how}
    trainer = L.Trainer(**named, **{**ON_CPU, "max_epochs": 1, "limit_val_batches": 0, **options})
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def exact_weights(module):
    """Return the float32 weights of a model by name: the masters where there are any."""
    masters = existing_masters(module.parameters())
    found = {}
    for fqn, p in module.named_parameters():
        if msamp_state_of(p) is not None:
            found[fqn] = values_of(p)
        else:
            found[fqn] = masters.get(id(p), p.detach().float())
    return {fqn: value.detach().clone() for fqn, value in found.items()}


def with_weights(weights, **options):
    """Return a fresh float32 model with these weights."""
    module = Net(**options)
    with torch.no_grad():
        for fqn, p in module.named_parameters():
            p.copy_(weights[fqn])
    return module


def same_bits(a, b):
    """Return whether two dicts of tensors are equal, bit for bit."""
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
