"""LightningCLI, the launchers, and a Lightning whose seams moved."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_lowprec
from tests import forked

ROOT = Path(lightning_lowprec.__file__).parents[1]
MODULES = """
import lightning as L, torch
class Model(L.LightningModule):
    def __init__(self, width: int = 16):
        super().__init__()
        self.layer = torch.nn.Linear(16, width)
    def training_step(self, batch, batch_idx):
        assert type(self.layer).__name__ in ("FP8Linear", "FSDPFP8Linear"), type(self.layer)  # the latter by FSDP2
        return self.layer(batch).float().pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
class Data(L.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(16, 16), batch_size=8)
"""
STOCK_CLI = """
import lightning_lowprec
from lightning.pytorch.cli import LightningCLI
from modules import Data, Model
LightningCLI(Model, Data)
"""
FAST = ["--trainer.fast_dev_run=true", "--trainer.accelerator=cpu", "--trainer.enable_model_summary=false"]


def python(*args, cwd, check=True, from_nothing=False, **env):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(cwd)]), "OMP_NUM_THREADS": "1", **env}
    if from_nothing:
        command = [sys.executable, *args]
        result = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=240)
    else:
        result = forked.python(*args, cwd=cwd, environ=environ)
    assert not check or result.returncode == 0, result.stderr[-3000:]
    return result


@pytest.fixture
def project(tmp_path):
    (tmp_path / "modules.py").write_text(MODULES)
    (tmp_path / "lowprec.py").write_text(STOCK_CLI)
    return tmp_path


SAYS_STRATEGY = """
from lightning.pytorch.callbacks import Callback
class Says(Callback):
    def on_train_batch_end(self, trainer, *args):
        options, plugin = trainer.strategy.sharding.options, trainer.precision_plugin
        print(f"said {type(trainer.strategy).__name__} {options.replicate} {options.wrap} {options.reduce_dtype}"
              f" {trainer.strategy.state_dict_type} {plugin.precision}")
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_stock_lightning_cli_configures_plugin_and_fsdp2_by_flags_and_by_yaml(project):
    (project / "modules.py").write_text(MODULES + SAYS_STRATEGY)
    plugin = "--trainer.plugins=lightning_lowprec.FP8TorchAO", '--trainer.plugins.recipe={"layer": {"forward": "bf16"}}'
    strategy = ["--trainer.strategy=lightning_lowprec.FSDP2Strategy", "--trainer.strategy.replicate=nodes"]
    strategy += ["--trainer.strategy.wrap=[torch.nn.Linear]", "--trainer.strategy.state_dict_type=full"]
    args = ["lowprec.py", "fit", *plugin, *strategy, *FAST, "--trainer.devices=1", "--trainer.callbacks=modules.Says"]
    environ = {"MASTER_PORT": "29487"}
    printed = python(*args, "--print_config", cwd=project, **environ).stdout
    assert "class_path: lightning_lowprec.FSDP2Strategy" in printed
    (project / "config.yaml").write_text(printed)
    for run in (args, ["lowprec.py", "fit", "--config=config.yaml"]):
        ran = python(*run, cwd=project, **environ)
        assert "said FSDP2Strategy nodes [<class 'torch.nn.modules.linear.Linear'>] None full" in ran.stdout
        assert "converted 1 of 1 linear layers (1 tensorwise, forward in bf16)" in ran.stderr


@pytest.mark.parametrize(("key", "given", "said"), [
    ("plugins", "[{class_path: lightning.fabric.plugins.environments.LightningEnvironment}, {class_path:"
                " lightning_lowprec.FP8TorchAO, init_args: {recipe: rowwise, base: fp17}}]",
     "`base='fp17'` is not valid; expected"),
    ("strategy", "{class_path: lightning_lowprec.FSDP2Strategy, init_args: {wrap: Block}}",
     "`wrap='Block'` is not valid; expected"),
    ("precision", "fp8-hybird", "Precision 'fp8-hybird' is invalid. Did you mean 'fp8-hybrid'? `lowprec doctor` lists"),
])  # fmt: skip
def test_stock_lightning_cli_shows_what_our_class_says_of_its_arguments(project, key, given, said):
    (project / "wrong.yaml").write_text(f"trainer: {{{key}: {given}}}\n")
    result = python("lowprec.py", "fit", "-c", "wrong.yaml", *FAST, cwd=project, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: trainer.{key}: {said}")
    assert "usage" not in result.stderr


@pytest.mark.slow
def test_lowprec_fit_imports_from_the_working_folder_and_from_files_and_adds_no_noise(project):
    command = ["-P", "-m", "lightning_lowprec.tools.cli"]  # -P: as a console command, without the working folder
    (project / "inner").mkdir()
    both = "import lightning, warnings\nfrom modules import *\nwarnings.warn('of mine')\nMine = lightning.Callback"
    (project / "inner" / "both.py").write_text(both)
    files = "--model", "inner/both.py:Model", "--data=inner/both.py:Data", "--trainer.callbacks=inner/both.py:Mine"
    args = ["fit", *files, *FAST, "--trainer.precision=fp8-hybrid"]
    ran = python(*command, *args, cwd=project, from_nothing=True, PYTHONPATH=str(ROOT))
    assert "of mine" in ran.stderr
    for noise in ("args parameter", "Failed to load", "register_constant"):
        assert noise not in ran.stderr, noise


@pytest.mark.slow
@pytest.mark.distributed
def test_lowprec_run_launches_a_console_command_with_fabric_and_trainer_and_its_precision_wins(project):
    """The command neither imports this package nor leaves the precision open, and it launches Fabric itself."""
    (project / "training.py").write_text("""
import os, sys, lightning as L
def main():
    fabric = L.Fabric(accelerator="cpu", precision="bf16-true")
    fabric.launch()
    world = fabric.launch(lambda fabric, factor: fabric.world_size * factor, 10)
    trainer = L.Trainer(logger=False, enable_checkpointing=False, precision="32-true")
    of_trainer = f"{type(trainer.strategy).__name__} {trainer.num_devices}"
    nodes = os.environ["PL_TRAINER_NUM_NODES"]  # which Lightning's Trainer reads
    words = [fabric.strategy.precision.precision, world, *sys.argv[1:], trainer.precision, of_trainer, nodes]
    open(f"said-{fabric.global_rank}.txt", "w").write(" ".join(map(str, words)))
    return 0
""")
    installed = project / "trainer_tool-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: trainer-tool\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[a]\ntool = os:abort\n[console_scripts]\ntool = training:main\n")
    args = ["--precision=fp8-hybrid", "--strategy", "ddp", "--devices=2", "--accelerator=cpu", "--main-port=29411"]
    command = ["-m", "lightning_lowprec.tools.cli", "run", *args, "tool", "--lr", "3"]
    ran = python(*command, cwd=project, LT_PRECISION="64-true")
    for rank in (0, 1):
        assert (project / f"said-{rank}.txt").read_text() == "fp8-hybrid 20 --lr 3 fp8-hybrid DDPStrategy 2 1"
    assert ran.stderr.count("`--precision=fp8-hybrid` wins over `precision='bf16-true'` of the script.") == 1
    assert ran.stderr.count("wins over") == 2
    assert "had no effect" not in ran.stderr


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("rank", "end", "code", "status"), [(0, "sys.exit(3)", 3, 3), (1, "os.abort()", -6, 1)])
def test_lowprec_run_ends_as_the_script_does_and_names_the_rank(project, rank, end, code, status):
    (project / "ends.py").write_text(f"import os, sys\nif os.environ['RANK'] == '{rank}': {end}\n")
    args = ["run", "--precision=fp8-hybrid", "--devices=2", "--main-port=29412", "ends.py"]
    ran = python("-m", "lightning_lowprec.tools.cli", *args, cwd=project, check=False)
    assert ran.returncode == status
    assert f"lowprec run: ends.py ended with exit code {code} on rank {rank}\n" in ran.stderr
    assert rank or "had no effect" not in ran.stderr


@pytest.mark.parametrize(("rank", "end"), [(0, ""), (0, "sys.exit()"), (0, "sys.exit(0)"), (1, "")])
def test_a_precision_that_nothing_used_is_said_once(project, rank, end):
    (project / "tools").mkdir()
    (project / "tools" / "plain.py").write_text(f"import sys, torch, modules\n{end}")  # of the working folder
    launcher = str(ROOT / "lightning_lowprec" / "tools" / "launcher.py")
    environ = {"LOWPREC_RUN_PRECISION": "fp8-hybrid", "PYTHONPATH": str(ROOT), "RANK": str(rank)}
    said = python(launcher, "tools/plain.py", cwd=project, **environ).stderr
    words = "lowprec run: `--precision=fp8-hybrid` had no effect: the command made no Trainer and no Fabric"
    assert (words in said) is (rank == 0)


MOVED = """
import pytest, warnings, lightning as L
import lightning.fabric.connector as c
del c._Connector._lazy_init_strategy
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import lightning_lowprec
said = [str(w.message) for w in caught]
assert any("_strategy moved" in s and "`plugins=lightning_lowprec.FP8TorchAO()` still" in s for s in said), said
for make in (L.Fabric, L.Trainer):
    with pytest.raises(ValueError, match="is invalid"):
        make(precision="fp8-hybrid")
trainer = L.Trainer(plugins=lightning_lowprec.FP8TorchAO(), accelerator="cpu", logger=False, enable_checkpointing=False)
assert trainer.precision == "fp8-hybrid"
L.Trainer(precision="bf16-mixed", accelerator="cpu", logger=False)
lightning_lowprec.unregister()
with pytest.raises(ValueError, match="is invalid"):
    L.Trainer(precision="fp8-hybrid")
"""


def test_a_lightning_whose_seams_moved(tmp_path):
    python("-c", MOVED, cwd=tmp_path)


IMPORT_COST = """
import sys, lightning
before = set(sys.modules)
def loaded():
    names = {name.partition(".")[0] for name in set(sys.modules) - before}
    return names & {"torchao", "transformer_engine", "matplotlib", "transformers"}
import lightning_lowprec
print(*loaded())
import torchao  # shows that the line above can say something
print(*loaded())
"""


@pytest.mark.slow
def test_importing_the_package_loads_nothing_heavy(tmp_path):
    ran = python("-c", IMPORT_COST, cwd=tmp_path, from_nothing=True)
    assert ran.stdout.splitlines() == ["", "torchao"]
