"""What every `lowprec` command has in common: guide, exit codes, JSON."""

import json
import os
import re
import sys
import warnings
from pathlib import Path

import pytest

import lightning_lowprec
from lightning_lowprec.tools import cli
from lightning_lowprec.tools.cli import main
from tests.serving.models import llama
from tests.tools.test_monitor_command import write

ROOT = Path(lightning_lowprec.__file__).parents[1]
PAGE = (ROOT / "docs" / "command-line.md").read_text()


def test_lowprec_says_which_command_is_for_what_and_its_exit_codes_as_the_page_does(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lowprec"])
    assert main() == 0
    said = capsys.readouterr().out
    assert {command.split()[1] for _, command in cli.GUIDE} == set(cli.COMMANDS)
    assert all(question in said and command in said for question, command in cli.GUIDE)
    assert len(said.splitlines()) <= 16
    assert max(map(len, said.splitlines())) <= 110
    assert main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    rows = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", PAGE, flags=re.MULTILINE))
    assert {int(code): meaning for code, meaning in rows.items()} == cli.EXIT_CODES
    for code, meaning in cli.EXIT_CODES.items():
        assert f"{code} {meaning}" in said
    of_export = cli.parser_of("export", *cli.COMMANDS["export"][1:])
    bounds = dict(re.findall(r"`--(m\w+)` \(([\d.]+)", (ROOT / "docs" / "serving.md").read_text()))
    assert len(bounds) == 3
    assert all(of_export.get_default(name) == float(bound) for name, bound in bounds.items())
    for command in cli.COMMANDS.keys() - {"fit"}:
        for cls in cli.COMMANDS[command][1:]:
            assert not re.search("Annotated|Rule|``|<function", cli.parser_of(command, cls).format_help()), command


def test_ctrl_c_a_reader_that_has_ended_and_a_missing_file_are_no_tracebacks(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert main(["doctor"]) == 141
    assert capsys.readouterr().err == ""

    error = KeyboardInterrupt()

    def fails(args):
        raise error

    monkeypatch.setattr("lightning_lowprec.tools.doctor.run", fails)
    monkeypatch.setattr(cli, "_fit", fails)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "\nlowprec doctor: stopped\n"
    for words in (["--debug", "doctor"], ["doctor", "--debug"]):
        with pytest.raises(KeyboardInterrupt):
            main(words)
    error = FileNotFoundError("no data.csv")
    assert main(["fit"]) == 2
    assert "lowprec fit: error: no data.csv\n" in capsys.readouterr().err
    error = ValueError("of the user's model")
    with pytest.raises(ValueError, match="of the user's model"):
        main(["fit"])


CHATTY = """
import torch
print("from an import")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        print("from a model")
        self.layer = torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 64)
    def forward(self, x):
        return self.head(self.layer(x))
"""
WITH_JSON = {
    "doctor": "",
    "doctor --for": "fp8-rowwise",
    "doctor --for=bf16-mixed": "",
    "doctor --device": "sm_80 --for=fp8-rowwise",
    "plan": "chatty.py:Model",
    "plan --fits": '80GB lightning_lowprec.tools.demo.ByteGPT --args={"depth":1,"width":32,"block_size":16} --batch=3'
    ' --precisions=32-true --data=lightning_lowprec.tools.demo.StdlibText --data_args={"block_size":16}',
    "monitor --keep": ".",
    "export --format": "hf small/model.safetensors served --model=small --dtype=fp32 --check"
    " --min_snr=1e9 --max_perplexity=0",
}
"""Every form of a command that prints results, but for those in the files of `compare` and `monitor`; its arguments."""


@pytest.mark.slow("plan --fits")
@pytest.mark.parametrize("form", WITH_JSON)
def test_json_is_all_of_stdout(form, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("chatty.py").write_text(CHATTY)
    write(tmp_path, {2: ("gradient", 0.75, 12.0)})
    if "small" in WITH_JSON[form]:
        llama().save_pretrained("small")
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status = main([*form.split(), *WITH_JSON[form].split(), "--json"])
    said = capfd.readouterr()
    assert json.loads(said.out, parse_constant=pytest.fail), said.err
    assert status == (form == "doctor --device")
