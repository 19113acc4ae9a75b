"""Words that have left: every answer of ``gone.py`` is given where the word is written, and every answer runs."""

import ast
import re
import shlex
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import lightning as L
import pytest
import torch

import lightning_lowprec
from lightning_lowprec import callbacks, gone, names, other_stacks
from lightning_lowprec.checks import check_choice
from lightning_lowprec.tools import cli

PAGE = (Path(__file__).parents[1] / "docs" / "removed.md").read_text()
FLAT = {
    "precision": gone.PRECISIONS,
    "option": gone.OPTIONS,
    "value": {f"{option}={value}": answer for option, row in gone.VALUES.items() for value, answer in row.items()},
    "import": gone.IMPORTS,
    "command": gone.COMMANDS,
    "flag": gone.FLAGS,
}
KNOWN = {*names.TABLE, *names.OF_LIGHTNING}
ANSWERS = sorted(set(chain.from_iterable(answers.values() for answers in FLAT.values())))
MODULES = {"lightning_lowprec": lightning_lowprec, "callbacks": callbacks, "torch": torch}
MODULES |= {name: getattr(lightning_lowprec, name) for name in lightning_lowprec.__all__}
MODULES |= {name: getattr(callbacks, name) for name in callbacks.__all__}

HAVE_OPTIONS = [
    *(lightning_lowprec.FP8TorchAO, lightning_lowprec.Int8TorchAO, lightning_lowprec.FP8TE),
    *(lightning_lowprec.HalfMixed, lightning_lowprec.MSAMP, lightning_lowprec.MasterConfig),
    *(lightning_lowprec.FSDP2Strategy, lightning_lowprec.FabricFSDP2Strategy, callbacks.NumericsMonitor),
]


def calls(answer):
    for span in re.findall(r"`([^`]+)`", answer):
        if (name := re.match(r"(\w+)(\.\w+)*\(", span)) and name[1] in MODULES:
            yield span


@pytest.mark.parametrize("answer", [*ANSWERS, *sorted({*other_stacks.PRECISIONS.values()})])
def test_answer_names_what_exists(answer):
    """Quoted names are precisions of today, and commands are parsed."""
    text = re.sub(r"`[^`]*`", "", answer)
    for name in re.findall(r"'([a-z0-9]+(?:-[a-z0-9]+)+)'", text):
        assert name in KNOWN, name
    for span in re.findall(r"`([^`]+)`", answer):
        if name := re.match(r'precision="([\w-]+)"$', span):
            assert name[1] in names.TABLE, span
        if span.startswith("lowprec "):
            _, command, *arguments = shlex.split(span)
            assert command in cli.COMMANDS, span
            parsers = [cli.parser_of(command, cls) for cls in cli.COMMANDS[command][1:]]
            known = {flag for parser in parsers for flag in parser._option_string_actions}
            assert {argument for argument in arguments if argument.startswith("-")} <= known, span


@pytest.mark.parametrize("answer", [answer for answer in ANSWERS if any(calls(answer))])
def test_answer_can_be_called(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}}, "last.ckpt")
    for call in calls(answer):
        tree = ast.parse(call, mode="eval")
        if call.startswith("FP8TE(") and find_spec("transformer_engine") is None:
            continue  # `make test-te` runs this file too
        if any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(tree)):
            continue  # a call with `...` shows where an argument stands
        assert eval(call, dict(MODULES)) is not None


@pytest.mark.parametrize(("kind", "word"), [(kind, word) for kind, answers in FLAT.items() for word in answers])
def test_page_has_the_word(kind, word):
    needle = word.partition("=")[2] if kind == "value" else word.rpartition(" ")[2]
    if kind == "precision":  # the page has a family once
        needle = "-master" if word.endswith("-master") else re.sub(r"-(remainder|8bit|sr|fp16)$", "", needle)
    word = re.escape(needle.removeprefix("--"))
    assert re.search(rf"(?<![\w]){word}(?![\w-])", PAGE), f"docs/removed.md has no row for {kind} {needle}"


@pytest.mark.parametrize("name", gone.PRECISIONS)
def test_precision(name):
    with pytest.raises(ValueError, match=rf"{name}' has left the package\. ") as raised:
        L.Trainer(precision=name, logger=False, accelerator="cpu")
    assert gone.PRECISIONS[name] in str(raised.value)


@pytest.mark.parametrize("option", gone.OPTIONS)
def test_option(option):
    for cls in HAVE_OPTIONS:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'. '{option}' has left") as raised:
            cls(**{option: None})
        assert gone.OPTIONS[option] in str(raised.value)


@pytest.mark.parametrize(("option", "value"), [(option, value) for option, row in gone.VALUES.items() for value in row])
def test_value(option, value):
    with pytest.raises(ValueError, match="has left the package") as raised:
        check_choice(option, value, ["other"])
    assert gone.VALUES[option][value] in str(raised.value)


@pytest.mark.parametrize("name", gone.IMPORTS)
def test_import(name):
    for module in ("", ".callbacks", ".msamp", ".msamp.ddp"):
        with pytest.raises(ImportError, match=f"{name}' has left the package") as raised:
            exec(f"from lightning_lowprec{module} import {name}")
        assert gone.IMPORTS[name] in str(raised.value)


LINES = [([command], answer) for command, answer in gone.COMMANDS.items()]
LINES += [(f"{entry}{value}".split(), answer) for entry, answer in gone.FLAGS.items() for value in (" 1", "=1")]
LINES += [(["plan", "--precisions"], gone.BARE_PRECISIONS)]
LINES += [(["export", "last.ckpt", "weights.safetensors"], gone.WITHOUT_FORMAT)]
LINES += [(["export", "last.ckpt", "weights.safetensors", "--dtype=keep"], gone.WITHOUT_FORMAT)]
LINES += [(["export", "a.ckpt", "out", "--model=llama", "--format=torchao"], gone.VALUES["format"]["torchao"])]


@pytest.mark.parametrize(("words", "answer"), LINES, ids=lambda part: " ".join(part) if isinstance(part, list) else "")
def test_command_line(words, answer, capsys):
    with pytest.raises(SystemExit, match="2"):
        sys.exit(cli.main(words))
    assert answer in capsys.readouterr().err
