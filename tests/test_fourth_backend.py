"""A backend that the package has never heard of (`tests/toy_backend/`) does what the three of the package do."""

import json
import re
import sys
from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_lowprec import FP8TorchAO, plain
from lightning_lowprec.conversion import backends
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.tools.cli import main
from tests.fsdp2.ranks import run
from tests.fsdp2.toy import Toy, X, Y
from tests.representatives import TABLE
from tests.toy_backend import BACKEND
from tests.toy_backend.linear import ToyLinear

NAME = "fp8-toy"


@pytest.fixture(autouse=True)
def registered():
    backends.register(BACKEND)
    yield
    if BACKEND in backends.registered():
        backends.unregister(BACKEND.name)


def toy_layers(model):
    return [fqn for fqn, module in model.named_modules() if isinstance(module, ToyLinear)]


def test_the_name_is_there_while_the_backend_is_registered():
    assert NAME in TABLE
    assert NAME in str(L.Trainer.__init__.__annotations__["precision"])
    backends.unregister(BACKEND.name)
    assert NAME not in TABLE
    assert NAME not in str(L.Trainer.__init__.__annotations__["precision"])
    with pytest.raises(ValueError, match="Precision 'fp8-toy' is invalid"):
        L.Trainer(precision=NAME, accelerator="cpu")


def test_what_is_registered_twice_or_never_raises():
    with pytest.raises(ValueError, match="`name='toy'` is a registered backend already"):
        backends.register(BACKEND)
    with pytest.raises(ValueError, match="`names` has 'fp8-toy', which the backend 'toy' has registered; choose"):
        backends.register(replace(BACKEND, name="other"))
    with pytest.raises(ValueError, match=r"`backend='mine'` is not registered; expected one of: torchao, .*, toy"):
        backends.unregister("mine")


def test_it_converts_and_gives_back_torchs_layers():
    model = Toy()
    parameters = list(model.parameters())
    L.Fabric(precision=NAME, accelerator="cpu", devices=1).setup(model, torch.optim.SGD(model.parameters()))
    assert toy_layers(model) == [f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")]
    fabric = L.Fabric(plugins=FP8TorchAO(), accelerator="cpu", devices=1)
    fabric.setup(model, torch.optim.SGD(model.parameters()))
    assert toy_layers(model) == [], "another precision starts from torch's layers"
    L.Fabric(precision=NAME, accelerator="cpu", devices=1).setup(model, torch.optim.SGD(model.parameters()))
    assert len(toy_layers(model)) == 4, "and back"
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), Conv1D(32, 32), torch.nn.Linear(32, 32))
    L.Fabric(precision=NAME, accelerator="cpu", devices=1).setup(model[:2], torch.optim.SGD(model[:2].parameters()))
    assert toy_layers(model) == ["0"], "it has not asked for a Conv1D"
    model[0].__class__ = type("FSDPToyLinear", (ToyLinear,), {})  # FSDP2 and users derive classes
    fabric.setup(model[2:])
    assert {type(layer) for layer in plain(model)} == {torch.nn.Linear, Conv1D}, "both backends give layers back"


def test_plan_and_doctor_know_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    module = tmp_path / "toy_model.py"
    module.write_text("from torch import nn\nNet = lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["plan", "toy_model.Net", "--precision", NAME, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["precision"] == NAME
    assert [row["fqn"] for row in planned["plan"]] == ["0", "1"]
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "Toy: needs nothing beside torch" in said
    assert re.search(rf"^Toy +\w+ +{NAME}: rounded to e4m3 on cpu$", said, flags=re.MULTILINE)
    assert main(["doctor", "--for", NAME]) == 0
    assert main(["doctor", "--for", NAME, "--device=sm_90"]) == 2
    assert "`precision='fp8-toy'` has no row in the table of what runs where" in capsys.readouterr().err
    sys.modules.pop("toy_model", None)


def train_sharded(rank, folder):
    backends.register(BACKEND)  # in this process too
    model = Toy()
    fabric = L.Fabric(precision=NAME, strategy="fsdp2", accelerator="cpu", devices=2)
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []

    def step(i):
        rows = slice(16 * i + 8 * rank, 16 * i + 8 * rank + 8)
        loss = nn.functional.cross_entropy(model(X[rows]).float(), Y[rows])
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    step(1)
    fabric.save(f"{folder}/state", {"model": model, "optimizer": optimizer})
    step(2)
    fabric.load(f"{folder}/state", {"model": model, "optimizer": optimizer})
    step(2)
    return {"losses": losses, "layers": toy_layers(model.module)}


def test_sharded_its_weights_are_gathered_as_float8_and_resume(tmp_path):
    assert L.Fabric(precision=NAME, accelerator="cpu").strategy.precision.gathers(ShardOptions()) is None
    for found in run(train_sharded, 2, tmp_path, str(tmp_path)):
        assert len(found["layers"]) == 4
        assert found["losses"][2] == found["losses"][3], "the step after the load is the step after the save"
        assert found["losses"][0] != found["losses"][2]
