"""What `lowprec` answers before anything runs imports neither torch nor Lightning; user code still finds all names."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import jsonargparse
import pytest
import torch

import lightning_lowprec
from lightning_lowprec.names import OF_LIGHTNING
from lightning_lowprec.private.either import MAIN
from lightning_lowprec.tools.cli import main

ROOT = Path(lightning_lowprec.__file__).parents[1]
COMMAND = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps([m for m in ("torch", "lightning") if m in sys.modules]), file=sys.stderr))
from lightning_lowprec.tools.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""
"""The console script that pip writes, which also says what was imported when it ends."""
LIGHT = [
    [],
    ["--help"],
    ["--version"],
    ["nope"],
    *([command, "--help"] for command in ("doctor", "plan", "compare", "monitor", "export", "run")),
    *([command, "--bogus"] for command in ("doctor", "plan", "compare", "monitor", "export", "run")),
    ["export", "a", "b", "--format", "nope"],
    ["plan", "llama", "--precision", "fp8-hybird"],
    ["plan", "llama", "--copies", "2"],
    ["--completion", "bash"],
    ["compare", "--precisions", "32-true,fp8-hybird"],
    ["compare", "--max-steps", "0"],
    ["compare", "--threads", "1"],
    ["doctor", "--for", "fp8"],
    ["run", "--precision", "bf16-fp8", "train.py"],
    ["run", "no-such-file.py"],
    ["monitor", "no-such-folder"],
]


@pytest.fixture(scope="module")
def lowprec(tmp_path_factory):
    """A console script named `lowprec`; returns status, what was said, and which of the heavy packages came in."""
    script = tmp_path_factory.mktemp("bin") / "lowprec"
    script.write_text(COMMAND)

    def call(*arguments, path=str(ROOT)):
        environ = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), *arguments]
        ran = subprocess.run(
            command, cwd=script.parent, env=environ, capture_output=True, text=True, timeout=240, check=False
        )
        *said, imported = ran.stderr.splitlines()
        return ran.returncode, ran.stdout + "\n".join(said), json.loads(imported)

    return call


EACH = """
import json, os, sys
from lightning_lowprec.tools.cli import main
heavy = [m for m in ("torch", "lightning") if m in sys.modules]
for number, arguments in enumerate(json.load(sys.stdin)):
    sys.stdout.flush()
    if os.fork() == 0:
        stdout, stderr = (os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT) for name in ("out", "err"))
        os.dup2(stdout, 1), os.dup2(stderr, 2)
        sys.argv[1:] = arguments
        status = 70
        try:
            status = main()
        except SystemExit as end:
            status = end.code
        finally:
            sys.stdout.flush()
            heavy = [m for m in ("torch", "lightning") if m in sys.modules]
            with open(f"{number}.ended", "w") as file:
                json.dump([status, heavy], file)
            os._exit(0)
    os.wait()
print(json.dumps(heavy))
"""
"""A console script that has imported the command and nothing else, and a copy of it for each line of arguments."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What `lowprec` answered to each of LIGHT: as of the fixture `lowprec`, from copies of one process."""
    folder = tmp_path_factory.mktemp("answers")
    (folder / "lowprec").write_text(EACH)
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command, given = [sys.executable, str(folder / "lowprec")], json.dumps(LIGHT)
    ran = subprocess.run(
        command, cwd=folder, env=environ, input=given, capture_output=True, text=True, timeout=240, check=True
    )
    assert json.loads(ran.stdout) == [], "the import of the command"
    found = {}
    for number, arguments in enumerate(LIGHT):
        out, err, ended = (folder / f"{number}.{name}" for name in ("out", "err", "ended"))
        status, imported = json.loads(ended.read_text())
        found[" ".join(arguments)] = status, out.read_text() + err.read_text(), imported
    return found


def test_a_console_script_imports_neither_torch_nor_lightning(lowprec):
    status, said, imported = lowprec("plan", "llama", "--precision", "fp8-hybird")
    assert status == 2, said
    assert imported == []


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_help_and_wrong_options_import_neither_torch_nor_lightning(answers, arguments):
    status, said, imported = answers[" ".join(arguments)]
    wrong = arguments[1:] not in ([], ["--help"]) or arguments == ["nope"]
    assert status == (2 if wrong else 0), said
    assert "Traceback" not in said
    assert imported == []


def test_this_test_can_fail(lowprec, tmp_path):
    """An empty `torch` is imported in no time."""
    (tmp_path / "torch.py").write_text("")
    status, said, imported = lowprec("doctor", path=f"{tmp_path}:{ROOT}")
    assert status != 0, said
    assert "torch" in imported


def test_a_wrong_name_is_answered_as_by_the_trainer(lowprec):
    _, said, _ = lowprec("run", "--precision", "fp8-hybird", "train.py")
    assert "Precision 'fp8-hybird' is invalid. Did you mean 'fp8-hybrid'? `lowprec doctor`" in said


def test_the_names_of_lightning_are_those_of_lightning():
    theirs = MAIN.module("fabric.plugins.precision.precision")
    inputs = theirs._PRECISION_INPUT_STR, theirs._PRECISION_INPUT_INT, theirs._PRECISION_INPUT_STR_ALIAS
    assert set(OF_LIGHTNING) == {name for group in inputs for name in get_args(group)}


MODEL = """
import lightning as L, lightning_lowprec, torch
L.Fabric(precision="bf16-sr", accelerator="cpu")
class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
        assert lightning_lowprec.HalfMixed is not None
"""


@pytest.mark.slow
def test_the_model_of_a_command_finds_the_names_registered(lowprec, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    status, said, _ = lowprec("plan", f"{tmp_path / 'model.py'}:Model")
    assert status in (0, 1), said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["plna", "llama"], "Did you mean 'plan'?"),
        (["plan", "llama", "--fitz", "80"], "Did you mean '--fits'?"),
        (["doctor", "--fro", "fp8-hybrid"], "Did you mean '--for'?"),
    ],
)
def test_a_misspelt_command_or_option_names_the_right_one(words, hint, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert capsys.readouterr().err.rstrip().endswith(hint)


@pytest.mark.parametrize("command", [["doctor"], ["compare"], ["fit", "--help"]])
def test_without_lightning_a_command_says_what_to_install(command, tmp_path):
    """All installed packages but Lightning's, on the path of a Python that reads no site-packages."""
    for path in {Path(module.__file__).parents[1] for module in (torch, jsonargparse)}:
        for entry in path.iterdir():
            if (
                not entry.name.startswith(("lightning", "pytorch_lightning", "__editable__"))
                or "utilities" in entry.name
            ):
                (tmp_path / entry.name).symlink_to(entry)
    script = tmp_path / "bin" / "lowprec"
    script.parent.mkdir(exist_ok=True)
    script.write_text(COMMAND)
    ran = subprocess.run(
        [sys.executable, "-S", script, *command],
        cwd=tmp_path / "bin",
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"lowprec {command[0]}: error: lightning_lowprec needs Lightning, and neither of its")
    assert "Traceback" not in ran.stderr
