"""Both packages of Lightning, in one process too; names that are known without an import."""

import pytest

import lightning_lowprec_autoload as autoload
from lightning_lowprec.callbacks import NumericsMonitor
from tests.once import once
from tests.registration.test_cli import python

pytestmark = pytest.mark.slow

MODEL = """
import sys, pytest, torch

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
import SECOND_FABRIC as of_fabric
module = torch.nn.Linear(16, 16)
assert lightning_lowprec.plain(of_fabric.Fabric(accelerator="cpu", precision="fp8-hybrid").setup(module)) is module
import SECOND as second
for name in NAMES:
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
        with pytest.raises(ValueError, match=said):
            pl.Trainer(**{"precision": "fp8-hybrid", "accelerator": "cpu", **wrong})
lightning_lowprec.unregister()
for pl in (first, second):
    with pytest.raises(ValueError, match="is invalid"):
        pl.Trainer(precision="fp8-hybrid", accelerator="cpu")
lightning_lowprec.register()
train(second, "fp8-hybrid")
print("all of", FIRST_NAME)
"""
)
IN_A_COPY = """
import os, sys, traceback

def in_a_copy(case, *arguments, name=None):
    # Runs the case in a copy of this process. What it says is in files.
    if os.fork():
        return os.wait()
    for stream, kind in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{name or case.__name__}.{kind}", os.O_WRONLY | os.O_CREAT), stream)
    try:
        case(*arguments)
        print("ended with 0")
    except SystemExit as end:
        print("ended with", end.code)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
"""
PER_PACKAGE = (
    MODEL
    + IN_A_COPY
    + """
import lightning_lowprec_autoload as autoload
autoload.install()  # as torch does, by the entry point

def nobody_asked():
    assert "lightning_lowprec" not in sys.modules, "nobody asked for it"

def without_import():
    train(pl, "bf16-mixed")
    nobody_asked()
    train(pl, "fp8-hybrid")
    import lightning_lowprec
    assert ("lightning.pytorch" in sys.modules) == (pl.__name__ == "lightning.pytorch"), "the other one stays out"
    assert autoload.installed_by_torch
    print("without an import")

def command_line(precision):
    class Model(BoringModel):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(32, 16)
    nobody_asked()
    sys.argv = ["train.py", "fit", f"--trainer.precision={precision}", "--trainer.fast_dev_run=1",
        "--trainer.accelerator=cpu"]
    cli = LightningCLI(Model)
    print(cli.trainer.precision)

def launcher():
    import click
    options = {option.name: option for option in _run.params}
    def read(name, value):
        return options[name].type.convert(value, options[name], None)
    assert (read("precision", "bf16-mixed"), read("strategy", "ddp")) == ("bf16-mixed", "ddp")
    nobody_asked()
    assert (read("precision", "fp8-hybrid"), read("strategy", "fsdp2")) == ("fp8-hybrid", "fsdp2")
    for name, wrong in (("precision", "fp8-hybird"), ("strategy", "fsdp3"), ("accelerator", "fp8-hybrid")):
        with pytest.raises(click.BadParameter):
            read(name, wrong)

def launched(name, value):
    nobody_asked()
    os.environ |= {"LT_CLI_USED": "1", name: value}  # as `fabric run` does
    strategy = FABRIC.Fabric(accelerator="cpu").strategy
    print(type(strategy).__name__, strategy.precision.precision)

from FABRIC.cli import _run
import FABRIC
in_a_copy(launcher)  # before the Trainer is imported, where that has a package of its own
in_a_copy(launched, "LT_STRATEGY", "fsdp2", name="strategy")
in_a_copy(launched, "LT_PRECISION", "fp8-hybrid", name="precision")
import PACKAGE as pl
from PACKAGE.cli import LightningCLI
from PACKAGE.demos.boring_classes import BoringModel
in_a_copy(without_import)
in_a_copy(command_line, "fp8-hybrid")
in_a_copy(command_line, "fp8-hybird", name="wrong")
"""
)
WITHOUT_THE_NAMES = (
    IN_A_COPY
    + """
import torch, lightning_lowprec_autoload as autoload, pytorch_lightning as pl

def ask_twice():
    for _ in range(2):
        try:
            pl.Trainer(precision="fp8-hybrid")
        except ValueError as error:
            print(error)

def broken(folder):
    del os.environ["LOWPREC_AUTOLOAD"]
    sys.path.insert(0, folder)
    autoload.install()
    pl.plugins.HalfPrecision("16-true").connect(None, [torch.optim.SGD([torch.ones(1).half().requires_grad_()])], [])
    ask_twice()

in_a_copy(ask_twice)
in_a_copy(broken, "FOLDER")
"""
)


FORKED = """
import sys, warnings
assert "pytorch_lightning" not in sys.modules
warnings.simplefilter("ignore")
"""
FABRIC_OF = {"pytorch_lightning": "lightning_fabric", "lightning.pytorch": "lightning.fabric"}
NAMES = ("fp8-hybrid", "bf16-remainder", "msamp-o2", "int8-mixed", "fp16-master", "half-auto")
"""Names that train in both packages, of which one was imported first; in the other order, two stand for all."""


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [("pytorch_lightning", "lightning.pytorch", NAMES), ("lightning.pytorch", "pytorch_lightning", NAMES[:2])],
)
def test_both_in_one_process_give_the_same_bits_and_resume_from_each_other(tmp_path, first, second, names):
    code = IN_ONE_PROCESS.replace("SECOND_FABRIC", FABRIC_OF[second]).replace("SECOND", second)
    code = code.replace("FIRST_NAME", repr(first)).replace("FIRST", first).replace("NAMES", repr(names))
    if first == "lightning.pytorch":  # which forked processes have imported, and not the other package
        ran = python("-c", FORKED + code, cwd=tmp_path)
    else:
        ran = python("-W", "ignore", "-c", code, cwd=tmp_path, from_nothing=True)
    assert f"all of {first}" in ran.stdout


@pytest.fixture(scope="module", params=["pytorch_lightning", "lightning.pytorch"])
def said(request, tmp_path_factory):
    package = request.param
    with once(tmp_path_factory.mktemp("package"), f"copies-of-{package}") as (folder, missing):
        if missing:
            code = PER_PACKAGE.replace("PACKAGE", package).replace("FABRIC", FABRIC_OF[package])
            python("-W", "ignore", "-c", code, cwd=folder, from_nothing=True)
        return {file.name: file.read_text() for file in folder.glob("*.std*")}


def test_names_are_known_without_an_import_to_trainer_launcher_and_command_line(said):
    assert said["without_import.stdout"].endswith("without an import\nended with 0\n"), said["without_import.stderr"]
    assert said["launcher.stdout"] == "ended with 0\n", said["launcher.stderr"]
    assert said["strategy.stdout"] == "FabricFSDP2Strategy 32-true\nended with 0\n", said["strategy.stderr"]
    assert said["precision.stdout"] == "SingleDeviceStrategy fp8-hybrid\nended with 0\n", said["precision.stderr"]
    assert said["command_line.stdout"].endswith("fp8-hybrid\nended with 0\n"), said["command_line.stderr"]
    assert said["wrong.stdout"].endswith("ended with 2\n"), said["wrong.stderr"]
    assert "did you mean 'fp8-hybrid'" in said["wrong.stderr"].lower()


def test_the_switch_leaves_lightning_alone_and_a_broken_package_is_said_once_and_breaks_nothing(tmp_path):
    (tmp_path / "lightning_lowprec").mkdir()
    (tmp_path / "lightning_lowprec" / "__init__.py").write_text("raise OSError('half a disk')")
    folder = tmp_path / "said"
    folder.mkdir()
    code = WITHOUT_THE_NAMES.replace("FOLDER", str(tmp_path))
    python("-c", code, cwd=folder, from_nothing=True, LOWPREC_AUTOLOAD="0")
    switched, broken = ((folder / f"{case}.stdout").read_text() for case in ("ask_twice", "broken"))
    for said in (switched, broken):
        assert said.count("Precision 'fp8-hybrid' is invalid") == 2
        assert said.endswith("ended with 0\n")
    switched, broken = ((folder / f"{case}.stderr").read_text() for case in ("ask_twice", "broken"))
    assert "lightning_lowprec" not in switched
    assert broken.count("lightning_lowprec cannot be imported, so its names are unknown: OSError") == 1
    assert "loses every update" in broken


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
