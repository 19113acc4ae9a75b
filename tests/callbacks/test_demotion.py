"""Layers that lose too much in FP8 go to bf16, decided by readings, kept on resume, and said at the end."""

import ast
import copy
import re

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lowprec import MSAMP, FP8TorchAO
from lightning_lowprec.callbacks import Demotion, NumericsMonitor
from lightning_lowprec.conversion import backends
from tests.precision.weights_left import as_trained

WIDTH, STEPS = 64, 8
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(many workers|isinstance.treespec|useless when run on CPU|runs in bf16 from here on).*"
)


def data(kind):
    """Values of about 1; or a large one in each row: then all others become 0 with one scale."""
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    if kind == "all rows":
        x[:, 0] = 1e6
    return x


class Net(L.LightningModule):
    """Two layers that see the input, and one behind a norm."""

    def __init__(self, kind="all rows"):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def training_step(self, x, batch_idx):
        hidden = self.norm(self.first(x).tanh() + self.second(x).tanh())
        return self.third(hidden).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def train_dataloader(self):
        return DataLoader(data(self.kind), batch_size=16)


def fit(net, folder, plugin=None, steps=STEPS, ckpt=None, monitor=None, **demotion):
    monitor = monitor or NumericsMonitor(every=1, rows=1.0, log=False, demote=Demotion(**{"patience": 2, **demotion}))
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    options = {"max_steps": steps, "max_epochs": -1, "default_root_dir": folder, "callbacks": [monitor], **quiet}
    trainer = L.Trainer(accelerator="cpu", plugins=as_trained(plugin or FP8TorchAO()), **options)
    trainer.fit(net, ckpt_path=ckpt)
    return trainer, monitor


@pytest.mark.parametrize(("kind", "layers"), [("none", []), ("all rows", ["first", "second"])])
def test_bad_layers_go_to_bf16(kind, layers, tmp_path):
    _, monitor = fit(Net(kind), tmp_path)
    assert monitor.demoter.demoted == dict.fromkeys(layers, "bf16")


def test_a_demotion_is_a_switch_by_hand_at_the_same_step(tmp_path):
    """Patience 2: bad at steps 0 and 1, bf16 from step 2."""
    net = Net()
    fit(net, tmp_path)
    by_hand = Net()
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=FP8TorchAO())
    wrapped, optimizer = fabric.setup(by_hand, by_hand.configure_optimizers())
    wrapped.mark_forward_method("training_step")
    for step in range(STEPS):
        if step == 2:
            backends.reconfigure(by_hand.first, "bf16")
            backends.reconfigure(by_hand.second, "bf16")
        with fabric.autocast():  # the Trainer does not cast the batch
            loss = by_hand.training_step(data("all rows"), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in by_hand.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_resumed_run_goes_on_with_what_was_counted_and_demoted(steps, tmp_path):
    whole = Net("all rows")
    _, expected = fit(whole, tmp_path / "whole")
    trainer, _ = fit(Net("all rows"), tmp_path / "part", steps=steps)
    trainer.save_checkpoint(tmp_path / "part.ckpt")
    assert torch.load(tmp_path / "part.ckpt", weights_only=True)["callbacks"]
    resumed = Net("all rows")
    _, monitor = fit(resumed, tmp_path / "part", ckpt=tmp_path / "part.ckpt")
    assert monitor.state_dict() == expected.state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_the_end_says_how_the_next_run_begins_so(tmp_path, caplog):
    net = Net()
    fit(net, tmp_path)
    (keep,) = re.search(r"layers were demoted.*with `keep=(.*)`\.$", caplog.text, re.MULTILINE).groups()
    plugin = FP8TorchAO(keep=ast.literal_eval(keep))
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    again = fabric.setup(Net())
    again.load_state_dict(net.state_dict())
    x = data("all rows")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        for name in ("first", "second", "third"):
            assert torch.equal(getattr(again, name)(x), getattr(net, name)(x)), name


def test_fabric_saves_and_restores_the_state():
    def steps(monitor, model, optimizer, numbers):
        for step in numbers:
            monitor.step(model, step)
            model.training_step(data("all rows"), step).backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.finish()

    def made():
        net = Net("all rows")
        fabric = L.Fabric(accelerator="cpu", devices=1, plugins=FP8TorchAO())
        wrapped, optimizer = fabric.setup(net, net.configure_optimizers())
        wrapped.mark_forward_method("training_step")
        return NumericsMonitor(every=1, rows=1.0, demote=Demotion(patience=2)), wrapped, optimizer

    whole = made()
    steps(*whole, range(6))
    first = made()
    steps(*first, range(3))
    second = made()
    second[1].load_state_dict(first[1].state_dict())
    second[0].load_state_dict(copy.deepcopy(first[0].state_dict()))
    steps(*second, range(3, 6))
    assert second[0].state_dict() == whole[0].state_dict()
    assert whole[0].demoter.demoted == {"first": "bf16", "second": "bf16"}
    assert all(torch.equal(value, second[1].state_dict()[name]) for name, value in whole[1].state_dict().items())


def test_what_cannot_be_demoted_raises(tmp_path):
    net = Net()
    net.configure_optimizers = lambda: torch.optim.AdamW(net.parameters(), lr=1e-6)
    with pytest.raises(ValueError, match=r"`demote=` is not possible with MS-AMP.*use FP8TorchAO"):
        fit(net, tmp_path, MSAMP("O2"))
    for wrong in ({"patience": 0}, {"underflow": "much"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Demotion(**wrong)
