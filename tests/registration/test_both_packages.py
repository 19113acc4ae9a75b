"""Both packages of Lightning, in one process too; names that are known without an import."""

import pytest
import tomllib

import lightning_lowprec_autoload as autoload
from lightning_lowprec.callbacks import NumericsMonitor
from tests.registration.test_cli import ROOT, python

MODEL = """
import sys, torch

def train(pl, precision, steps=4, **kwargs):
    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        def training_step(self, batch, batch_idx):
            return self.net(batch).square().mean()
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.05)
    data = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(1)).expand(8, 16, 32)
    model, resume = Model(), kwargs.pop("resume", None)
    callbacks = kwargs.pop("callbacks", [])
    trainer = pl.Trainer(precision=precision, accelerator="cpu", devices=1, max_steps=steps, logger=False, max_epochs=9,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        gradient_clip_val=kwargs.pop("clip", 0.01), **kwargs)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=None), ckpt_path=resume)
    return trainer, [p.detach().clone() for p in model.parameters()]

def same(one, other):
    return len(one) == len(other) == 4 and all(map(torch.equal, one, other))
"""
IN_ONE_PROCESS = (
    MODEL
    + """
import FIRST as first
import lightning_lowprec
import SECOND as second
for name in ("fp8-hybrid", "bf16-remainder", "msamp-o2", "int8-mixed", "fp16-master", "half-auto"):
    trainer, weights = train(first, name)
    assert trainer.precision == name
    trainer.save_checkpoint("first.ckpt")
    other, the_same = train(second, name)
    assert other.precision == name and same(weights, the_same), name
    _, longer = train(first, name, steps=7)
    _, resumed = train(second, name, steps=7, resume="first.ckpt")
    assert same(longer, resumed), name
for pl in (first, second):
    tied = lightning_lowprec.FP8TorchAO(recipe="rowwise")
    assert train(pl, None, plugins=tied)[0].precision_plugin is tied
    monitor = lightning_lowprec.callbacks.NumericsMonitor(every=1)
    assert isinstance(monitor, pl.Callback)
    train(pl, "fp8-hybrid", callbacks=[monitor])
    trainer, _ = train(pl, "fp8-hybrid", strategy="fsdp2", clip=None)
    assert isinstance(trainer.strategy, pl.strategies.ModelParallelStrategy), type(trainer.strategy).__mro__
    mine = lightning_lowprec.FSDP2Strategy(state_dict_type="full")
    trainer, _ = train(pl, "bf16-master", strategy=mine, clip=None)
    assert isinstance(trainer.strategy, pl.strategies.ModelParallelStrategy) and trainer.strategy.is_full
    trainer, _ = train(pl, "bf16-master", strategy=pl.strategies.FSDPStrategy(), clip=None)
    assert trainer.strategy.strategy_name == "fsdp2"
    for wrong, said in (({"strategy": "dp"}, "dp"), ({"precision": "fp8-hybird"}, "fp8-hybrid")):
        try:
            pl.Trainer(**{"precision": "fp8-hybrid", "accelerator": "cpu", **wrong})
        except ValueError as error:
            assert said in str(error), error
        else:
            raise AssertionError(wrong)
import lightning.fabric, lightning_fabric
for fabric_package in (lightning.fabric, lightning_fabric):
    fabric = fabric_package.Fabric(precision="fp16-master", accelerator="cpu")
    model, optimizer = fabric.setup(*(m := torch.nn.Linear(32, 32), torch.optim.SGD(m.parameters())))
    fabric.backward(model(torch.ones(16, 32)).sum())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    assert lightning_lowprec.plain(model) is not model
lightning_lowprec.unregister()
for pl in (first, second):
    try:
        pl.Trainer(precision="fp8-hybrid", accelerator="cpu")
    except ValueError as error:
        assert "is invalid" in str(error), error
    else:
        raise AssertionError("still registered")
lightning_lowprec.register()
train(second, "fp8-hybrid")
print("all of", FIRST_NAME)
"""
)
WITHOUT_IMPORT = (
    MODEL
    + """
import lightning_lowprec_autoload as autoload
autoload.install()  # as torch does, by the entry point
import PACKAGE as pl
import PACKAGE.cli
train(pl, "bf16-mixed")
assert "lightning_lowprec" not in sys.modules, "nobody asked for it"
train(pl, "fp8-hybrid")
import lightning_lowprec
assert ("lightning.pytorch" in sys.modules) == (pl.__name__ == "lightning.pytorch"), "the other one stays out"
assert autoload.installed_by_torch
print("without an import")
"""
)
FROM_THE_COMMAND_LINE = MODEL + (
    """
import lightning_lowprec_autoload as autoload
autoload.install()
from PACKAGE.cli import LightningCLI
import PACKAGE as pl
from PACKAGE.demos.boring_classes import BoringModel
sys.argv = ["train.py", "fit", "--trainer.precision=PRECISION", "--trainer.fast_dev_run=1", "--trainer.accelerator=cpu"]
class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 16)
cli = LightningCLI(Model)
print(cli.trainer.precision)
"""
)
FABRIC_RUN = """
import lightning_lowprec_autoload as autoload, sys, click
autoload.install()
from FABRIC.cli import _run
options = {option.name: option for option in _run.params}
def read(name, value):
    return options[name].type.convert(value, options[name], None)
assert (read("precision", "bf16-mixed"), read("strategy", "ddp")) == ("bf16-mixed", "ddp")
assert "lightning_lowprec" not in sys.modules, "nobody asked for it"
assert (read("precision", "fp8-hybrid"), read("strategy", "fsdp2")) == ("fp8-hybrid", "fsdp2")
for name, wrong in (("precision", "fp8-hybird"), ("strategy", "fsdp3"), ("accelerator", "fp8-hybrid")):
    try:
        print(wrong, "is taken as", read(name, wrong))
    except click.BadParameter:
        print("refused")
"""
BROKEN = (
    "import torch, lightning_lowprec_autoload as autoload; autoload.install(); import pytorch_lightning as pl\n"
    "for _ in range(2):\n"
    "    try:\n        pl.Trainer(precision='fp8-hybrid')\n"
    "    except ValueError as error:\n        print(error)\n"
)


@pytest.mark.parametrize(
    ("first", "second"), [("pytorch_lightning", "lightning.pytorch"), ("lightning.pytorch", "pytorch_lightning")]
)
def test_both_in_one_process_give_the_same_bits_and_resume_from_each_other(tmp_path, first, second):
    code = IN_ONE_PROCESS.replace("FIRST_NAME", repr(first)).replace("FIRST", first).replace("SECOND", second)
    ran = python("-W", "ignore", "-c", code, cwd=tmp_path, from_nothing=True)
    assert f"all of {first}" in ran.stdout


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_names_are_known_without_an_import(tmp_path, package):
    code = WITHOUT_IMPORT.replace("PACKAGE", package)
    ran = python("-W", "ignore", "-c", code, cwd=tmp_path, from_nothing=True)
    assert "without an import" in ran.stdout


@pytest.mark.parametrize("fabric", ["lightning_fabric", "lightning.fabric"])
def test_the_launcher_of_fabric_takes_the_names(tmp_path, fabric):
    ran = python("-W", "ignore", "-c", FABRIC_RUN.replace("FABRIC", fabric), cwd=tmp_path, from_nothing=True)
    assert ran.stdout.split() == ["refused", "refused", "refused"]


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_the_command_line_of_both(tmp_path, package):
    code = FROM_THE_COMMAND_LINE.replace("PACKAGE", package)
    ran = python("-c", code.replace("PRECISION", "fp8-hybrid"), cwd=tmp_path, from_nothing=True)
    assert ran.stdout.splitlines()[-1] == "fp8-hybrid"
    wrong = python("-c", code.replace("PRECISION", "fp8-hybird"), cwd=tmp_path, from_nothing=True, check=False)
    assert wrong.returncode == 2
    assert "did you mean 'fp8-hybrid'" in wrong.stderr.lower()


def test_the_switch_leaves_lightning_alone(tmp_path):
    ran = python("-c", BROKEN, cwd=tmp_path, from_nothing=True, LOWPREC_AUTOLOAD="0")
    assert ran.stdout.count("Precision 'fp8-hybrid' is invalid") == 2
    assert "lightning_lowprec" not in ran.stderr


def test_a_package_that_cannot_be_imported_is_said_once_and_breaks_nothing(tmp_path):
    (tmp_path / "lightning_lowprec").mkdir()
    (tmp_path / "lightning_lowprec" / "__init__.py").write_text("raise OSError('half a disk')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{BROKEN}"
    ran = python("-c", code, cwd=tmp_path, from_nothing=True)
    assert ran.stdout.count("Precision 'fp8-hybrid' is invalid") == 2
    assert ran.stderr.count("lightning_lowprec cannot be imported, so its names are unknown: OSError") == 1


def test_the_variable_of_the_monitor(monkeypatch):
    assert autoload.monitor() == []
    monkeypatch.setenv("LOWPREC_MONITOR", "20")
    (monitor,) = autoload.monitor()
    assert isinstance(monitor, NumericsMonitor)
    assert monitor.every == 20
    for wrong in ("yes", "0", "-1"):
        monkeypatch.setenv("LOWPREC_MONITOR", wrong)
        with pytest.raises(ValueError, match=r"LOWPREC_MONITOR=.* expected a number of optimizer steps, such as 100"):
            autoload.monitor()


def test_torch_and_lightning_find_the_entry_points():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    monitor = {"lightning_lowprec": "lightning_lowprec_autoload:monitor"}
    assert project["project"]["entry-points"] == {
        "torch.backends": {"lightning_lowprec": "lightning_lowprec_autoload:install"},
        "lightning.pytorch.callbacks_factory": monitor,
        "pytorch_lightning.callbacks_factory": monitor,
    }
    assert project["tool"]["setuptools"]["py-modules"] == ["lightning_lowprec_autoload"]
