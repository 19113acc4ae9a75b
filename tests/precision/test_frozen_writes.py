"""Frozen half-precision weights that a program writes to: one warning, with names and the way out."""

import copy
import re

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tests.toys import ON_CPU

WRITES = {
    "in place": lambda t, s: t.mul_(0.999).add_(s, alpha=0.001),
    "foreach": lambda t, s: torch._foreach_lerp_([t], [s.to(t.dtype)], 0.001),
    "data": lambda t, s: t.data[-1:].mul_(0.9).add_(s.data[-1:], alpha=0.1),
    "new data": lambda t, s: setattr(t, "data", t.data * 0.999 + s.data.to(t.dtype) * 0.001),
    "nothing": lambda t, s: None,
}
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


class Student(L.LightningModule):
    def __init__(self, write, after=0):
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(64, 64)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.base.weight.data = self.base.weight.data.t()  # not contiguous
        self.write, self.after = write, after  # steps

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                (self.write if batch_idx >= self.after else WRITES["nothing"])(t, s)
        return (self.student(self.base(batch)) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.student.parameters(), 1e-2)


def fit(module, name, steps, caught):
    torch.manual_seed(0)
    data = DataLoader([torch.randn(32, 64) for _ in range(steps)], batch_size=None)
    L.Trainer(max_steps=steps, precision=name, **ON_CPU).fit(module, data)
    return [said for w in caught if "the program writes to" in (said := str(w.message))]


NAMED = [("in place", name, 0) for name in ("bf16-sr", "fp8-hybrid-remainder")]
NAMED += [(write, "bf16-remainder", 3) for write in WRITES]


@pytest.mark.parametrize(("write", "name", "after"), NAMED)
def test_a_teacher_averaged_by_hand_is_named_once(write, name, after, caught):
    said = fit(Student(WRITES[write], after), name, 40 if after else 3, caught)
    assert len(said) == (write != "nothing")
    for line in said:
        assert f"`precision='{name}'`: the program writes to 'teacher.weight' and 1 more" in line
        assert re.search(r"`keep_fp32=\['teacher.weight'\]` of \w+; the name of their module does too\.$", line)


class Clipped(Student):
    """A critic as WGAN has it: its weights are clipped after each step."""

    def __init__(self, clip):
        super().__init__(None)
        self.clip = clip
        self.student.turned = nn.Parameter(torch.randn(8, 16).t())

    def training_step(self, batch, batch_idx):
        return (self.student(batch) - batch).square().mean()

    def on_train_batch_end(self, *_):
        for parameter in self.student.parameters():
            self.clip(parameter)


CLIPS = {
    "data": lambda parameter: parameter.data.clamp_(-0.05, 0.05),
    "new data": lambda parameter: setattr(parameter, "data", parameter.data.clamp(-0.05, 0.05)),
    "in place": torch.no_grad()(lambda parameter: parameter.clamp_(-0.05, 0.05)),
}


@pytest.mark.parametrize("name", ["bf16-master", "bf16-remainder", "fp16-master", "bf16-mixed"])
@pytest.mark.parametrize("clip", CLIPS)
def test_clipped_weights_stay_clipped_or_it_is_said(name, clip, caught):
    said = fit(Clipped(CLIPS[clip]), name, 32, caught)  # fp16 skips the first
    undone = clip == "data" and name.endswith("-master")
    assert len(said) == undone
    if said:
        assert "writes to 'student.weight' and 1 more in place through `.data`, which float32 masters cannot" in said[0]
    module = Clipped(CLIPS[clip])
    fabric = L.Fabric(accelerator="cpu", precision=name)
    model, optimizer = fabric.setup(module.student, torch.optim.SGD(module.student.parameters(), lr=0.0))
    module.student.weight.data[0] = module.student.bias.data[0] = torch.nan  # from the start, no clipping makes it
    caught.clear()
    for change in (lambda parameter: None, CLIPS[clip]):
        fabric.backward(model(torch.randn(4, 64)).float().mean())  # fp16 does not overflow
        change(module.student.weight)
        optimizer.step()
    assert any("which float32 masters cannot see" in str(w.message) for w in caught) == undone
    assert (module.student.weight[1:].abs().max() > 0.051) == undone


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 64)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("name", ["bf16-master", "bf16-remainder", "bf16-8bit", "fp16-master", "fp8-hybrid-remainder"])
def test_an_average_written_before_the_first_step_of_fabric_keeps_float32(name):
    module = Averaged()
    exact = module.net.weight.detach().clone()
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.net.parameters()))
    for _ in range(3):
        fabric.backward(model(torch.ones(2, 64)).float().sum())
        module.average.update_parameters(module.net)
    assert torch.equal(module.average.module.weight, exact)
    optimizer.step()
    assert not torch.equal(module.net.weight, exact)
