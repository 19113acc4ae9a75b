"""Start a training in every way that Lightning has, with this package installed and nowhere imported.

    python tools/starts.py PYTHON

PYTHON is that of an environment with the wheel, both packages of Lightning, jsonargparse and nbclient.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MODEL = """
import sys, torch
import {package} as pl

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
    def training_step(self, batch, batch_idx):
        assert "lightning_lowprec" in type(self.layer).__module__, type(self.layer)
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(16, 16), batch_size=4)
"""
TRAIN = (
    MODEL
    + """
if __name__ == "__main__":
    pl.Trainer(precision="fp8-hybrid", accelerator="cpu", max_steps=2, barebones=True{more}).fit(Model())
    print("trained in", type(pl.Trainer(precision="fp8-hybrid", accelerator="cpu").precision_plugin).__name__)
"""
)
CLI = (
    MODEL
    + """
from {package}.cli import LightningCLI
if __name__ == "__main__":
    print("trained in", LightningCLI(Model).trainer.precision)
"""
)
FABRIC = """
import torch, lightning as L
fabric = L.Fabric({arguments})
model = torch.nn.Sequential(torch.nn.Linear(16, 16))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters()))
fabric.backward(model(torch.ones(16, 16)).sum())
optimizer.step()
print("trained in", type(fabric._precision).__name__)
"""
NOTEBOOK = """
import nbformat, nbclient, pathlib
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(pathlib.Path("train.py").read_text())])
nbclient.NotebookClient(notebook, timeout=200).execute()
print("".join(output.get("text", "") for output in notebook.cells[0].outputs))
"""
PORT = "--main-port=29417"  # that of the other `fabric run` is 29400
RUN = "from lightning.fabric.cli import _main; _main()"  # the command `fabric`
PL = "lightning.pytorch"
FLAGS = ("fit", "--trainer.precision=fp8-hybrid", "--trainer.fast_dev_run=2", "--trainer.accelerator=cpu")

STARTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "a script": (TRAIN.format(package=PL, more=""), ["train.py"]),
    "a script on pytorch_lightning": (TRAIN.format(package="pytorch_lightning", more=""), ["train.py"]),
    "LightningCLI": (CLI.format(package=PL), ["train.py", *FLAGS]),
    "LightningCLI of pytorch_lightning": (CLI.format(package="pytorch_lightning"), ["train.py", *FLAGS]),
    "fabric run": (
        FABRIC.format(arguments="precision='fp8-hybrid'"),
        ["-m", "lightning.fabric.cli", "--accelerator=cpu", "train.py"],
    ),
    "fabric run --precision": (
        FABRIC.format(arguments=""),
        ["-c", RUN, "run", "--accelerator=cpu", "--precision=fp8-hybrid", PORT, "train.py"],
    ),
    "torchrun": (
        TRAIN.format(package=PL, more=", devices=2, strategy='ddp'"),
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"],
    ),
    "ddp_spawn": (TRAIN.format(package=PL, more=", devices=2, strategy='ddp_spawn'"), ["train.py"]),
    "a notebook": (TRAIN.format(package=PL, more=""), ["-c", NOTEBOOK]),
}
"""What is run, by the name of the way: ``train.py``, and the arguments of Python."""


def run(python: str, name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start one training in a folder of its own; ``variables`` are added to the environment."""
    source, arguments = STARTS[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(source)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        environment.pop("PYTHONPATH", None)
        command = [python, "-W", "ignore", *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def trained(ran: subprocess.CompletedProcess[str]) -> bool:
    """Return whether a start has trained in FP8."""
    return ran.returncode == 0 and any(f"trained in {word}" in ran.stdout for word in ("FP8TorchAO", "fp8-hybrid"))


def main(python: str) -> int:
    """Start each; return 1 and print what it said if one has not trained, or if the switch does not work."""
    with ThreadPoolExecutor(2) as pool:
        runs = dict(zip(STARTS, pool.map(lambda name: run(python, name), STARTS), strict=True))
    watched = {name: run(python, name, LOWPREC_MONITOR="1") for name in STARTS if name.startswith("a script")}
    off = run(python, "a script", LOWPREC_AUTOLOAD="0")
    wrong = {name: ran for name, ran in runs.items() if not trained(ran)}
    for name, ran in watched.items():
        if "NumericsMonitor: 1 layers are looked at" not in ran.stderr:
            wrong[f"LOWPREC_MONITOR=1, {name}"] = ran
    if "Precision 'fp8-hybrid' is invalid" not in off.stderr:
        wrong["LOWPREC_AUTOLOAD=0"] = off
    for name, ran in wrong.items():
        print(f"{name}:\n{ran.stdout[-1000:]}{ran.stderr[-3000:]}")
    print(f"{len(runs) - len(wrong)} of {len(runs)} ways to start train in FP8 without an import: {', '.join(runs)}.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
