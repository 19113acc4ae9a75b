"""Scripts that complete ``lowprec`` in a shell: commands, options, names of precisions, files.

A script is made once from the parsers of the commands and is then static: pressing TAB does not start Python.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from jsonargparse import capture_parser

from lightning_lowprec import names as precisions
from lightning_lowprec.extras import require
from lightning_lowprec.private.argparse import actions

Shell = Literal["bash", "zsh", "fish"]
SHELLS: Final = get_args(Shell)
_MAKERS: Final = {"doctor": "doctor", "run": "launcher"}  # modules whose parsers are argparse's
_PRECISION: Final = {"precision", "precisions", "name", "trainer.precision"}  # options that take a name of the table
_FILE: Final = {
    "source", "run", "html", "markdown", "checkpoint", "out", "script", "config", "model", "tokenizer",
    "adapter_config", "check_text",
}  # fmt: skip


def script(
    shell: Shell,
    commands: Mapping[str, tuple[str, Sequence[list[str]]]],
    start: Callable[[str, list[str]], object],
) -> str:
    """Return the completion script for a shell.

    Args:
        shell: the shell.
        commands: by name, the help of each command, and the arguments that choose each of its parsers.
        start: runs a command. The run is interrupted where the command would parse its arguments.

    Raises:
        ModuleNotFoundError: shtab is not installed; the message has the command that installs it.
    """
    shtab = require("shtab", "`lowprec --completion`")
    parser = argparse.ArgumentParser(prog="lowprec")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--completion", choices=SHELLS, help="print a script that completes lowprec in a shell")
    subcommands = parser.add_subparsers(dest="command")
    for name, (words, modes) in commands.items():
        command = subcommands.add_parser(name, help=words)
        by_dest: dict[str, list[argparse.Action]] = {}
        for mode in modes:
            for action in parser_actions(name, mode, start):
                by_dest.setdefault(action.dest, []).append(action)
        for dest, same in by_dest.items():
            copy = _copy(same, command, dashes=name != "fit")
            if copy is not None and dest in _FILE:
                copy.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def parser_actions(name: str, mode: list[str], start: Callable[[str, list[str]], object]) -> list[argparse.Action]:
    """Return options and arguments of a command, in the mode that some arguments choose."""
    if name in _MAKERS:
        return actions(importlib.import_module(f"lightning_lowprec.tools.{_MAKERS[name]}").make_parser())
    found = actions(capture_parser(lambda: start(name, mode)))
    if name != "fit":
        return found
    nested = next(action for action in found if isinstance(action.choices, Mapping))
    return actions(nested.choices["fit"])  # type: ignore[index]  # LightningCLI has `fit` as a command of its own


def _copy(same: Sequence[argparse.Action], parser: argparse.ArgumentParser, *, dashes: bool) -> argparse.Action | None:
    """Add an option or argument, which every mode has in its own form, to a parser that is never run."""
    action = same[0]
    if action.dest == "help" or action.help == argparse.SUPPRESS:
        return None
    spelled = dict.fromkeys(option.replace("_", "-") if dashes else option for option in action.option_strings)
    settings: dict[str, Any] = {"help": _first_sentence(action.help or "")}
    if action.nargs == 0:
        return parser.add_argument(*spelled, action="store_true", **settings)
    settings["choices"] = list(precisions.TABLE) if action.dest in _PRECISION else _all_choices(same)
    nargs = argparse.REMAINDER if action.nargs == argparse.REMAINDER else "?" if not spelled else None
    return parser.add_argument(*(spelled or [action.dest]), nargs=nargs, **settings)


def _all_choices(same: Sequence[argparse.Action]) -> Collection[str] | None:
    """Return what one of the modes allows; None if one of them allows everything."""
    found = [_choices(action) for action in same]
    return None if None in found else list(dict.fromkeys(choice for choices in found for choice in choices or ()))


def _choices(action: argparse.Action) -> Collection[str] | None:
    """Return the allowed values, which jsonargparse keeps as the placeholder ``{keep,fp32}``."""
    found = re.fullmatch(r"\{(.+)\}", action.metavar if isinstance(action.metavar, str) else "")
    return action.choices if found is None else found[1].split(",")  # type: ignore[return-value]


def _first_sentence(words: str) -> str:
    """Return the first sentence of a help, without signs that argparse would replace."""
    return re.split(r"(?<=[.;]) |\n", words.strip())[0].rstrip(".;").replace("%", "%%")
