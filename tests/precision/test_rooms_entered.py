"""A fit enters no room of another backend, and a step few files and functions: a reader can follow both."""

import inspect
import sys
from pathlib import Path
from weakref import WeakSet

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import optimizer
from torch.utils.data import DataLoader

import lightning_lowprec
from tests.toys import ON_CPU, Task

ROOT = Path(lightning_lowprec.__file__).parent


class Net(Task):
    def __init__(self, marks):
        super().__init__(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))
        self.marks = marks

    def on_train_batch_start(self, batch, batch_idx):
        self.marks["in a step"] = batch_idx == 5

    def on_train_batch_end(self, *_):
        self.marks["in a step"] = False


def entered(precision, monkeypatch):
    """Return the files that a fit enters, and the functions that its sixth step enters, with their files."""
    data = DataLoader(torch.randn(32, 64), batch_size=4)
    # a run with masters adds a check of all steps, once in a process; the runs below are without it
    L.Trainer(precision="bf16-master", max_steps=1, **ON_CPU).fit(Net({}), data)
    monkeypatch.setattr(optimizer, "_global_optimizer_pre_hooks", {})
    monkeypatch.setattr("lightning_lowprec.conversion.layer_runs.waiting", WeakSet())  # layers of other tests' models
    marks, fit, step = {"in a step": False}, set(), set()  # functions, with the files that they stand in

    def note(frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_flags & inspect.CO_OPTIMIZED or not code.co_filename.startswith(f"{ROOT}/"):
            return  # no function of ours; a class body is none
        file = str(Path(code.co_filename).relative_to(ROOT))
        fit.add(file)
        if marks["in a step"]:
            step.add((file, code.co_qualname))

    trainer, net = L.Trainer(precision=precision, max_steps=8, **ON_CPU), Net(marks)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        trainer.fit(net, data)
    finally:
        sys.setprofile(before)
    return fit, step


@pytest.mark.filterwarnings("ignore:.*(many workers|isinstance.treespec|expected to be slower).*")
@pytest.mark.parametrize(
    ("precision", "files", "functions"),
    [("fp8-hybrid", 9, 36), ("bf16-8bit", 10, 60), ("bf16-remainder", 8, 40), ("msamp-o2", 12, 70)],
)
def test_a_fit_enters_its_own_rooms(precision, files, functions, monkeypatch):
    """Comprehensions count as functions."""
    fit, step = entered(precision, monkeypatch)
    others = {"te/", "msamp/", "fsdp2/", "zero", "torchao/"} - {"msamp/" if precision == "msamp-o2" else "torchao/"}
    assert not {file for file in fit if file.startswith(tuple(others))}
    assert len(fit) <= 50, sorted(fit)
    assert len({file for file, _ in step}) <= files, sorted({file for file, _ in step})
    assert len(step) <= functions, sorted(step)
