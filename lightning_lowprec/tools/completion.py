"""Scripts that complete ``lowprec`` in a shell: commands, options, names of precisions, files.

A script is made once from the parsers of the commands and is then static: pressing TAB does not start Python.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, get_args

from lightning_lowprec import names as precisions
from lightning_lowprec.extras import require
from lightning_lowprec.private.names import actions
from lightning_lowprec.tools.parsers import COMMANDS, parsers

Shell = Literal["bash", "zsh", "fish"]
SHELLS: Final = get_args(Shell)
_PRECISION: Final = {"precision", "precisions", "name", "trainer.precision"}  # options that take a name of the table
_FILE: Final = {
    "source", "run", "html", "markdown", "checkpoint", "out", "script", "config", "model", "tokenizer",
    "adapter_config", "check_text",
}  # fmt: skip
_FIT: Final = ("model", "data", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path", "weights_only")
"""Options of LightningCLI's ``fit``, beside ``--config`` and those of the Trainer."""


def script(shell: Shell) -> str:
    """Return the completion script for a shell; without shtab raise ImportError."""
    shtab = require("shtab", "`lowprec --completion`")
    parser = argparse.ArgumentParser(prog="lowprec")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--completion", choices=SHELLS, help="print a script that completes lowprec in a shell")
    subcommands = parser.add_subparsers(dest="command")
    for name, words in COMMANDS.items():
        command = subcommands.add_parser(name, help=words)
        modes = [_fit()] if name == "fit" else parsers(name)
        # of export's two modes the one without --format allows more, where both have an option
        for action in {action.dest: action for mode in reversed(modes) for action in actions(mode)}.values():
            copy = _copy(action, command, dashes=name != "fit")
            if copy is not None and action.dest in _FILE:
                copy.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _fit() -> argparse.ArgumentParser:
    """Return a parser with the options of LightningCLI, whose own parser takes seconds to import and to build."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-c", "--config", help="path to a configuration file")
    parser.add_argument("--print_config", nargs="?", help="print the configuration and end")
    for name in _FIT:
        parser.add_argument(f"--{name}")
    for name, is_switch in _trainer_options().items():
        parser.add_argument(f"--trainer.{name}", choices=("true", "false") if is_switch else None)
    return parser


def _trainer_options() -> dict[str, bool]:
    """Return the arguments of Lightning's Trainer, read from its source, and whether each is True or False."""
    packages = {"lightning": "pytorch/trainer", "pytorch_lightning": "trainer"}
    folder = next(
        Path(found.origin or "").parent / part for name, part in packages.items() if (found := find_spec(name))
    )
    source = (folder / "trainer.py").read_text(encoding="utf-8")
    (trainer,) = (part for part in ast.parse(source).body if isinstance(part, ast.ClassDef) and part.name == "Trainer")
    init = next(part for part in trainer.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
    hints = {arg.arg: ast.unparse(arg.annotation) if arg.annotation else "" for arg in init.args.kwonlyargs}
    return {name: "bool" in hint.split("[") for name, hint in hints.items()}


def _copy(action: argparse.Action, parser: argparse.ArgumentParser, *, dashes: bool) -> argparse.Action | None:
    """Add an option or argument to a parser that is never run."""
    if action.dest == "help" or action.help == argparse.SUPPRESS:
        return None
    spelled = dict.fromkeys(option.replace("_", "-") if dashes else option for option in action.option_strings)
    settings: dict[str, Any] = {"help": _first_sentence(action.help or "")}
    if action.nargs == 0:
        return parser.add_argument(*spelled, action="store_true", **settings)
    settings["choices"] = list(precisions.TABLE) if action.dest in _PRECISION else _choices(action)
    nargs = argparse.REMAINDER if action.nargs == argparse.REMAINDER else "?" if not spelled else None
    return parser.add_argument(*(spelled or [action.dest]), nargs=nargs, **settings)


def _choices(action: argparse.Action) -> Collection[str] | None:
    """Return the allowed values, which jsonargparse keeps as the placeholder ``{keep,fp32}``."""
    placeholder = re.fullmatch(r"\{(.+)\}", action.metavar if isinstance(action.metavar, str) else "")
    return action.choices if placeholder is None else placeholder[1].split(",")  # type: ignore[return-value]


def _first_sentence(words: str) -> str:
    """Return the first sentence of a help, without signs that argparse would replace."""
    return re.split(r"(?<=[.;]) |\n", words.strip())[0].rstrip(".;").replace("%", "%%")
