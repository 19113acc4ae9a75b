"""`lowprec compare`: real trainings in real processes, with settings as small as they go."""

import json
import math
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

import lightning_lowprec
from lightning_lowprec.tools.class_path import build, load_class
from lightning_lowprec.tools.cli import main
from lightning_lowprec.tools.compare import runner
from lightning_lowprec.tools.compare.comparison import PrecisionResult
from lightning_lowprec.tools.compare.runner import Recorder, train_all
from lightning_lowprec.tools.demo import NEXT, ByteGPT, StdlibText
from lightning_lowprec.tools.options import CompareSpec
from tests import forked
from tests.tools.test_comparison import result

USER_FILE = '''
import os

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(2, 1)))

    val_dataloader = train_dataloader


class Model(L.LightningModule):
    """Its losses are what `modes` says for this precision."""

    def __init__(self, modes):
        super().__init__()
        self.modes = modes
        self.weight = torch.nn.Parameter(torch.ones(1))

    @property
    def mode(self):
        return self.modes.get(self.trainer.precision)

    def training_step(self, batch, batch_idx):
        print("half a line", end="")
        if self.mode == "kill":
            os.kill(os.getpid(), 9)
        if self.mode == "raise":
            raise RuntimeError("the model has had enough")
        return self.weight.sum() * (float("nan") if self.mode == "nan" and batch_idx == 1 else 1.0)

    def validation_step(self, batch, batch_idx):
        self.log("score", torch.tensor(9.0 if batch_idx else 2.1 if self.mode == "gap" else 2.0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
'''


CODE = """
import sys

from lightning_lowprec.tools.cli import main
from lightning_lowprec.tools.compare import runner
from lightning_lowprec.tools.compare.comparison import PrecisionResult

runner.START = "fork"
sys.exit(main(["compare", *sys.argv[1:]]))
"""


def compare(arguments: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Return the status, stdout and stderr of the command; each precision trains in a fork of its process.

    Each precision of `examples/first_steps.ipynb` trains in a process that starts from nothing.
    """
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = forked.python("-c", CODE, *arguments, cwd=folder, environ=environ)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.slow
def test_seeds_are_compared_in_pairs(tmp_path):
    (tmp_path / "fp8-hybrid-seed4.log").write_text("fp8-hybrid: of an earlier comparison\n")
    status, stdout, stderr = compare(
        [
            *("--precisions=bf16-mixed,fp8-hybrid", "--model-args", "{depth: 1, width: 16, heads: 1, block_size: 16}"),
            *("--data-args", '{"block_size": 16, "max_bytes": 20000}', "--accelerator=cpu"),
            *("--max-steps=24", "--val-every=10", "--val-batches=2", f"--out={tmp_path}", "--seed=3", "--seeds=2"),
            "--max-loss-gap=1000",
        ],
        tmp_path,
    )
    assert status == 0, stdout + stderr
    assert "fp8-hybrid, seed 4 (4 of 4): step 24 of 24, loss " in stderr
    figures = json.loads((tmp_path / "results.json").read_text())
    runs = {(run["seed"], run["name"]): run["train_losses"] for run in figures["results"]}
    assert [*runs] == [(seed, name) for seed in (3, 4) for name in ("bf16-mixed", "fp8-hybrid")]
    for seed in (3, 4):
        baseline, fp8 = runs[seed, "bf16-mixed"], runs[seed, "fp8-hybrid"]
        assert fp8 != baseline
        assert fp8 == pytest.approx(baseline, rel=0.01), "the same weights, the same data"
        assert baseline[0] == pytest.approx(math.log(256), abs=0.1)
        assert (tmp_path / f"fp8-hybrid-seed{seed}.log").is_file()
    assert runs[3, "bf16-mixed"][0] != runs[4, "bf16-mixed"][0]
    for run in figures["results"]:
        assert run["val_steps"] == [10, 20, 24], "and after the last step, which no interval hits"
        assert run["peak_memory"] is None, "only a GPU's memory is measured"
        assert run["device"].startswith("CPU (")
        assert ", 1 of " in run["device"], "one thread"
    page = (tmp_path / "report.md").read_text()
    assert "of an earlier comparison" not in page
    for said in ("converted 4 of 5", "emulated", "\n- python: ", "\n- torch: ", "\n- lightning-lowprec: "):
        assert said in page


FAILURES = {
    "bf16-mixed": ("raise", "failed: RuntimeError: the model has had enough"),
    "64-true": ("nan", "failed: FloatingPointError: the training loss is nan at step 2"),
    "bf16-true": ("kill", "failed: the process was killed by signal 9"),
    "half-auto": ("gap", "off by more than 1%"),
}


@pytest.mark.slow
def test_what_fails_is_shown_and_leaves_the_others(tmp_path):
    user_file, out = tmp_path / "user_model.py", tmp_path / "out"
    user_file.write_text(USER_FILE)
    modes = {name: mode for name, (mode, _) in FAILURES.items()}
    status, stdout, stderr = compare(
        [
            *("--precisions", ",".join(["32-true", *FAILURES]), "--model", f"{user_file}:Model"),
            *("--model-args", json.dumps({"modes": modes}), "--data", f"{user_file}:Data", "--val-metric=score"),
            *("--max-steps=3", "--val-every=2", "--val-batches=1", "--accelerator=cpu", f"--out={out}"),
        ],
        tmp_path,
    )
    assert status == 1
    assert "half a line" in stdout
    assert "training_step" in stderr, "the traceback is shown"
    *table, path, verdict = stdout.splitlines()[-8:]
    assert verdict.endswith("The exit status is 1.")
    page = Path(path).read_text()
    figures = json.loads((out / "results.json").read_text())
    first, *failed = figures["results"]
    assert figures["ok"] is False
    assert first["ok"]
    for run, (name, (_, text)) in zip(failed, FAILURES.items(), strict=True):
        assert not run["ok"]
        assert run["text"].startswith(text)
        assert any(line.startswith(name) and text in line for line in table)
        assert text in page
        assert (out / f"{name}.log").is_file()
    assert failed[1]["train_losses"] == [1.0, None], "as far as it got"
    assert first["train_losses"] == pytest.approx([1.0, 0.9, 0.8])
    assert failed[-1]["train_losses"] == pytest.approx([1.0, 0.9, 0.8])
    assert failed[-1]["gap"] == pytest.approx(0.05, abs=1e-6)


def test_what_would_fail_at_the_end_fails_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "run_one", lambda *_, **__: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    (tmp_path / "my_task.py").write_text("import lightning as L\nclass Task(L.LightningModule):\n    pass\n"
                                         "class Data(L.LightningDataModule):\n    pass\n")  # fmt: skip
    below_a_file, out, task = str(tmp_path / "file" / "out"), str(tmp_path / "out"), f"{tmp_path}/my_task.py:Task"
    for words, message in (
        (["--precisions=32-true,fp8-hybird", f"--out={out}"], "'fp8-hybird' is invalid.*Did you mean 'fp8-hybrid'"),
        ([f"--out={below_a_file}"], f"^lowprec compare: error: .*{re.escape(below_a_file)}"),
        ([f"--data={tmp_path}/my_task.py:Data", f"--out={out}"], "Data has no `val_dataloader`"),
        ([f"--model={task}", f"--out={out}"], "Task has no `validation_step`: `lowprec compare` judges by the loss"),
    ):
        assert main(["compare", *words]) == 2
        assert re.search(message, capsys.readouterr().err)
    with pytest.raises(OSError, match="Not a directory"):
        main(["--debug", "compare", f"--out={below_a_file}"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["compare", f"--out={out}"]) == 2
    assert "`pip install matplotlib`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_holds_one_comparison(tmp_path, monkeypatch, capsys):
    trained = []

    def train(spec, name, seed, progress):
        trained.append(name)
        with pytest.raises(ValueError, match=r"out=.*is in use: another comparison is running there"):
            train_all(CompareSpec(precisions=["bf16-mixed"], out=tmp_path))
        return result(name, val_steps=[1, 2], step_seconds=[0.1])

    monkeypatch.setattr(runner, "run_one", train)
    train_all(CompareSpec(precisions=["32-true"], out=tmp_path))
    before = (tmp_path / "report.md").read_text()
    with pytest.raises(ValueError, match="holds the report of an earlier comparison") as kept:  # as a notebook does
        train_all(CompareSpec(precisions=["bf16-mixed"], out=tmp_path))
    assert main(["compare", "--precisions=bf16-mixed", f"--out={tmp_path}"]) == 2
    assert "`--force` to write over the report" in capsys.readouterr().err
    assert (tmp_path / "report.md").read_text() == before
    assert main(["compare", "--precisions= bf16-mixed", f"--out={tmp_path}", "--force"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "Every precision trained and ended with the final val_loss within 1% of bf16-mixed's. The exit status is 0.",
        NEXT,
    ]
    assert "bf16-mixed" in (tmp_path / "report.md").read_text()
    assert trained == ["32-true", "bf16-mixed"]
    assert kept.tb


def test_json_is_all_of_stdout_whatever_the_model_prints(tmp_path, monkeypatch, capfd):
    def train(spec, name, seed, progress):
        os.write(1, b"said by the model\n")  # as a process of a training does, which inherits stdout
        return result(name, val_steps=[1, 2], step_seconds=[0.1], train_losses=[math.nan, 1.0])

    monkeypatch.setattr(runner, "run_one", train)
    assert main(["compare", "--precisions=32-true", f"--out={tmp_path}", "--json"]) == 0
    stdout, stderr = capfd.readouterr()
    assert stdout == (tmp_path / "results.json").read_text()
    assert json.loads(stdout)["results"][0]["train_losses"] == [None, 1.0]
    assert "said by the model" in stderr
    assert main(["compare", f"--out={tmp_path}", "--json"]) == 2, "the folder has a report"
    os.write(1, b"back\n")
    assert capfd.readouterr().out == "back\n"


def test_wrong_settings_and_what_another_process_cannot_import_are_refused():
    for kwargs, message in (
        ({"precisions": ["a", "b", "a"]}, "expected each name once: remove the repeated a"),
        ({"max_steps": 0}, "`max_steps=0` is not valid; expected an integer of at least 1"),
        ({"max_loss_gap": math.nan}, "`max_loss_gap=nan` is not valid"),
    ):
        with pytest.raises(ValueError, match=message):
            CompareSpec(**kwargs)

    class Local(nn.Module):
        pass

    typed = type("Typed", (nn.Module,), {"__module__": "__main__"})
    for given in (Local, typed):
        said = rf"`model=<class .*Write the class into a file, and give 'file.py:{given.__name__}'"
        with pytest.raises(ValueError, match=said):
            lightning_lowprec.compare(model=given)
    with pytest.raises(ValueError, match=r"expected a class or its path.*by `data_args`"):
        lightning_lowprec.compare(data=StdlibText())
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        lightning_lowprec.compare(steps=3)


@pytest.mark.parametrize(("logged", "names"), [({"score": 1.0, "acc": 2.0}, "acc, score"), ({}, "nothing")])
def test_a_metric_that_was_not_logged_and_a_step_without_loss_are_named(logged, names):
    trainer = SimpleNamespace(callback_metrics=logged)
    with pytest.raises(ValueError, match=f"`val_metric='val_loss'` was not logged; logged: {names}[.]"):
        Recorder(CompareSpec(), None).on_validation_end(trainer, None)
    with pytest.raises(ValueError, match="training_step returned no loss; expected"):
        Recorder(CompareSpec(), None).on_train_batch_end(None, None, {}, None, 0)


def test_classes_load_from_modules_and_files(tmp_path, monkeypatch):
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 7\n__all__ = ['Gone']")
    file = tmp_path / "my_classes.py"
    file.write_text(
        "from neighbour_of_mine import VALUE\nclass Thing:\n    def __init__(self, seed=VALUE): self.seed = seed"
        "\nclass Stops:\n    def __init__(self, seed): raise KeyError(seed)"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    thing = load_class(f"{file}:Thing")
    assert load_class(f"{file}:Thing") is thing, "a file is imported once"
    assert thing().seed == 7
    assert build(f"{file}:Thing", {}, seed=3).seed == 3
    assert build(f"{file}:Thing", {"seed": 1}, seed=3).seed == 1
    assert build("collections.Counter", {"a": 2}, seed=3) == {"a": 2}
    for model in ({}, {"model": f"{file}:Stops"}):
        with pytest.raises(KeyError, match=r"^4$"):
            runner.fit(CompareSpec(data=f"{file}:Stops", **model), "32-true", 4, print)
    (tmp_path / "of_a_missing_one.py").write_text("import not_there")
    for path, error, message in (
        (f"{file}:Thin", ImportError, r"my_classes has no 'Thin'; its classes are: Stops, Thing\."),
        (f"{tmp_path}/neighbour_of_mine.py:Thing", ImportError, r"its classes are: none\."),
        ("lightning_lowprec.tools.demo.ByteGTP", ImportError, r"its classes are: ByteGPT, StdlibText\."),
        (f"{tmp_path}/of_a_missing_one.py:Thing", ModuleNotFoundError, r"^No module named 'not_there'$"),
        ("nosuch.Model", ModuleNotFoundError, "No module named 'nosuch', neither in the working folder"),
        ("Model", ValueError, r"'Model' is not a class path; expected package\.module\.Class or path"),
        ("my.no-name", ValueError, "'my.no-name' is not a class path"),
    ):
        with pytest.raises(error, match=message):
            load_class(path)
    for name in ("my_classes", "neighbour_of_mine"):
        del sys.modules[name]


def test_classes_become_paths_and_settings_reach_the_command(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(runner, "train_all", lambda spec, progress: asked.append((spec, progress)))
    lightning_lowprec.compare(["32-true"], ByteGPT, data=StdlibText, out=str(tmp_path), max_steps=7, progress=False)
    lightning_lowprec.compare(model="my.py:Model")
    (first, shown), (second, also) = asked
    assert (first.model, first.data) == ("lightning_lowprec.tools.demo.ByteGPT", CompareSpec().data)
    assert (first.out, first.max_steps, shown, also) == (tmp_path, 7, False, True)
    assert second == CompareSpec(model="my.py:Model", precisions=list(CompareSpec().precisions))


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("steps", [1, None])
def test_progress_is_a_bar_or_lines_and_can_be_left_out(capfd, monkeypatch, terminal, steps):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.send({"loss": 1.5, "seconds": 0.1, "step": 1})
    sender.close()
    found = PrecisionResult(name="32-true")
    runner._receive(receiver, found, "32-true", steps)
    assert found.train_losses == [1.5]
    shown = capfd.readouterr().err
    line = "32-true: 100%" if terminal else "32-true: step 1 of 1, loss 1.500\n"
    assert shown == "" if steps is None else line in shown
