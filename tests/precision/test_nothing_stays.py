"""After a run of the Trainer, modules and parameters have the classes, attributes and hooks of torch.

They are those after the same run under Lightning's `32-true`.
"""

import lightning as L
import pytest
import torch
from torch import nn

from tests.toys import ON_CPU

NAMES = ["fp8-hybrid", "fp8-block", "int8-mixed", "half-auto", "bf16-master", "fp16-master", "bf16-remainder"]
NAMES += ["bf16-8bit", "bf16-sr", "fp8-hybrid-8bit", "fp8-hybrid-fp16", "mxfp8", "msamp-o1", "msamp-o2", "msamp-o3"]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
        self.frozen = nn.Linear(64, 64).requires_grad_(False)

    def training_step(self, batch, _):
        return self.frozen(self.body(batch)).float().square().mean()

    def test_step(self, batch):
        self.body(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.body.parameters(), lr=1e-3)


def noted(module: nn.Module) -> dict[str, object]:
    """Return the class, the names of attributes and the hooks of every module and parameter."""
    walked = {}
    for fqn, part in module.named_modules():
        hooks = {key: len(value) for key, value in vars(part).items() if "hooks" in key and hasattr(value, "__len__")}
        walked[fqn] = type(part), vars(part).keys() - {"_trainer", "_fabric"}, hooks
    for fqn, p in module.named_parameters():
        walked[f"{fqn} (parameter)"] = type(p), p.dtype, dict(vars(p)), p._backward_hooks
    return walked


@pytest.mark.parametrize("run", ["fit", "validate"])
@pytest.mark.parametrize("name", NAMES)
def test_modules_parameters_and_optimizers_are_as_before(name, run):
    found = []
    for precision in ("32-true", name):
        module, batches = Net(), torch.utils.data.DataLoader(torch.randn(32, 64), batch_size=16)
        trainer = L.Trainer(precision=precision, **{**ON_CPU, "max_epochs": 1})
        trainer.fit(module, batches) if run == "fit" else trainer.test(module, batches, verbose=False)
        found.append((noted(module), [type(o) for o in trainer.optimizers]))
    assert found[1] == found[0]
