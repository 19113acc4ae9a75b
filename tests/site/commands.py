"""Check a command line of the docs by the parser of the command, without a run."""

import argparse
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec

import jsonargparse
import pytest
import tomllib
from packaging.requirements import Requirement

from lightning_lowprec.tools import cli
from tests.representatives import OF_LIGHTNING, TABLE
from tests.site.pages import ROOT

USERS_OWN = {"train.py", "zero_to_fp32.py"}
"""Scripts of the reader, and one that DeepSpeed writes beside a checkpoint."""
OF_OTHERS = {"nvidia-cuda-nvrtc"}
"""Packages that come with torch for CUDA."""


class ParsedError(BaseException):
    """Ends a command when its arguments are parsed; no ``except Exception`` catches it."""


def check_lowprec(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command, *arguments = words
    if command == "COMMAND":  # `lowprec COMMAND --help`
        return
    assert command in cli.COMMANDS
    if command == "fit":  # LightningCLI would import the reader's classes
        names = [word.partition("=")[2] for word in arguments if word.startswith("--trainer.precision=")]
        assert names
        assert set(names) <= {*TABLE, *OF_LIGHTNING}
        return
    for cls in (argparse.ArgumentParser, jsonargparse.ArgumentParser):
        monkeypatch.setattr(cls, "parse_args", _ending(cls.parse_args))
    with pytest.raises(SystemExit if "--help" in arguments else ParsedError):
        cli.parse(command, arguments)
    monkeypatch.undo()


def _ending(parse_args: Callable) -> Callable:
    def parse_and_end(*args, **kwargs):
        parsed = parse_args(*args, **kwargs)
        for name in _precisions(vars(parsed)):
            assert name in {*TABLE, *OF_LIGHTNING}, name
        raise ParsedError

    return parse_and_end


def _precisions(parsed: dict) -> list[str]:
    """Return the precisions among the arguments; ``lowprec doctor --for NAME`` calls the name ``name``."""
    entries = [parsed.get("precision"), parsed.get("name"), parsed.get("precisions")]
    words = [word for entry in entries for word in ([entry] if isinstance(entry, str) else entry or [])]
    return [name for word in words for name in word.split(",") if name]


def check_make(words: list[str], _: pytest.MonkeyPatch) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(targets)


def check_python(words: list[str], _: pytest.MonkeyPatch) -> None:
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
    elif words[0] == "-m":
        assert find_spec(words[1]) is not None, words[1]
    else:
        assert words[0] in USERS_OWN or (ROOT / words[0]).is_file(), words[0]


def check_pip(words: list[str], _: pytest.MonkeyPatch) -> None:
    """Look for extras and packages in pyproject.toml; this package itself is on no index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    known = {*(Requirement(line).name for line in needed), *OF_OTHERS} - {project["name"]}
    assert words[0] == "install"
    for word in words[1:]:
        if asked := re.fullmatch(r"\.\[([\w,]+)\]", word):
            assert set(asked[1].split(",")) <= set(extras)
        elif not word.startswith("-"):
            assert Requirement(word).name in known, word


def check_launcher(words: list[str], _: pytest.MonkeyPatch) -> None:
    scripts = [word for word in words if word.endswith(".py")]
    assert scripts
    assert all(word in USERS_OWN or (ROOT / word).is_file() for word in scripts), scripts


CHECKS: dict[str, Callable[[list[str], pytest.MonkeyPatch], None]] = {
    "lowprec": check_lowprec,
    "make": check_make,
    "python": check_python,
    "pip": check_pip,
    "uv": lambda words, patch: check_pip(words[1:], patch),
    "torchrun": check_launcher,
    "srun": check_launcher,
    "fabric": check_launcher,
}


def check_line(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one line, of one program or several behind ``|``; a program that is not in ``CHECKS`` is an error."""
    words = shlex.split(line, comments=True)
    if "|" in words:
        at = words.index("|")
        check_line(shlex.join(words[at + 1 :]), monkeypatch)
        words = words[:at]
    if ">" in words:
        words = words[: words.index(">")]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    if words:
        CHECKS[words[0]](words[1:], monkeypatch)
