"""What `lowprec` answers before anything runs imports neither torch nor Lightning."""

import json
import subprocess
import sys
from pathlib import Path

import jsonargparse
import pytest
import torch

import lightning_lowprec
from lightning_lowprec.tools.cli import main

ROOT = Path(lightning_lowprec.__file__).parents[1]
LIGHT = [
    [],
    ["--help"],
    ["-h"],
    ["--version"],
    ["nope"],
    *([c, flag] for c in ("doctor", "plan", "compare", "monitor", "export", "run") for flag in ("--help", "--bogus")),
    ["export", "a", "b", "--format", "nope"],
    ["plan", "llama", "--precision", "fp8-hybird"],
    ["--completion", "bash"],
    ["compare", "--precisions", "32-true,fp8-hybird"],
    ["compare", "--max-steps", "0"],
    ["compare", "--threads", "1"],
    ["doctor", "--for", "fp8"],
    ["run", "no-such-file.py"],
    ["monitor", "no-such-folder"],
]


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


def answers(lines, folder, *options, path=str(ROOT)):
    """What `lowprec` answers to each line: status, what was said, and which of the heavy packages came in."""
    script = folder / "bin" / "lowprec"
    script.parent.mkdir(exist_ok=True)
    script.write_text(EACH)
    environ = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *options, str(script)], cwd=script.parent, env=environ, input=json.dumps(lines),
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert json.loads(ran.stdout) == [], "the import of the command"
    found = {}
    for number, arguments in enumerate(lines):
        out, err, ended = (script.parent / f"{number}.{name}" for name in ("out", "err", "ended"))
        status, imported = json.loads(ended.read_text())
        found[" ".join(arguments)] = status, out.read_text() + err.read_text(), imported
    return found


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    return answers(LIGHT, tmp_path_factory.mktemp("light"))


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_help_and_wrong_options_import_neither_torch_nor_lightning(light, arguments):
    status, said, imported = light[" ".join(arguments)]
    wrong = arguments[1:] not in ([], ["--help"]) or arguments == ["nope"]
    assert status == (2 if wrong else 0), said
    assert (said == f"{lightning_lowprec.__version__}\n") is (arguments == ["--version"])
    assert "Traceback" not in said
    assert imported == []


FOLDER = ("export", "a.ckpt", "out", "--model=llama")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["plna", "llama"], "Did you mean 'plan'?"),
        (["plan", "llama", "--fit", "80"], "Did you mean '--fits'?"),
        (["doctor", "--fro", "fp8-hybrid"], "Did you mean '--for'?"),
        (["export", "a.ckpt", "out", "--fromat", "hf"], "Did you mean '--format'?"),
        (["run", "--precision=fp8", "train.py"], "bf16 elsewhere. `lowprec doctor` lists the names of this package."),
        (["plan", "llama", "--fits=80GB", "--strategy=fsdp3"], "expected one of: 'fsdp2'. Did you mean 'fsdp2'?"),
        (["run", "env"], "is there, and belongs to another environment, or is no Python.)"),
        (["run", "gone.py"], "of a Python script, or a command that a package installs, such as 'litgpt'."),
        ([*FOLDER, "--format=hf-fp8-blok"], "'compressed-tensors'. Did you mean 'hf-fp8-block'?"),
        ([*FOLDER, "--format=hf", "--dtype=fp8"], "'fp8'` is not valid; expected one of: 'bf16', 'fp32', 'fp16'"),
    ],
)
def test_a_misspelt_command_or_option_names_the_right_one(words, hint, capsys):
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(words))
    assert capsys.readouterr().err.partition("\n`lowprec --debug")[0].rstrip().endswith(hint)


def test_without_lightning_a_command_says_what_to_install(tmp_path):
    """All installed packages but Lightning's, on the path of a Python that reads no site-packages."""
    for path in {Path(module.__file__).parents[1] for module in (torch, jsonargparse)}:
        for entry in path.iterdir():
            lightnings = entry.name.startswith(("lightning", "pytorch_lightning", "__editable__"))
            if (not lightnings or "utilities" in entry.name) and entry.name != "bin":
                (tmp_path / entry.name).symlink_to(entry)
    lines = [["doctor"], ["compare"], ["fit", "--help"]]
    for words, (status, said, _) in answers(lines, tmp_path, "-S", path=f"{ROOT}:{tmp_path}").items():
        assert status == 2
        begins = f"lowprec {words.split()[0]}: error: lightning_lowprec needs Lightning, and neither of its"
        assert said.startswith(begins), said
        assert "Traceback" not in said
