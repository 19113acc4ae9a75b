"""Scripts that complete ``lowprec`` in a shell: commands, options, names of precisions, files.

A script is made once from the parsers of the commands and is then static: pressing TAB does not start Python.
"""

import argparse
import re
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
_FIT: Final = (
    *("config", "model", "data", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path", "print_config"),
    *(f"trainer.{name}" for name in ("precision", "accelerator", "devices", "strategy", "max_epochs", "max_steps")),
)


def script(shell: Shell) -> str:
    """Return the completion script for a shell; without shtab raise ImportError."""
    shtab = require("shtab", "`lowprec --completion`")
    parser = argparse.ArgumentParser(prog="lowprec")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--completion", choices=SHELLS, help="print a script that completes lowprec in a shell")
    commands = parser.add_subparsers(dest="command")
    for name, words in COMMANDS.items():
        # of export's two modes the one without --format allows more, where both have an option
        modes = [_fit()] if name == "fit" else parsers(name)[::-1]
        command = commands.add_parser(name, help=words, parents=modes, add_help=False, conflict_handler="resolve")
        for action in actions(command):
            _complete(action, dashes=name != "fit", file=shtab.FILE)
    return str(shtab.complete(parser, shell))


def _fit() -> argparse.ArgumentParser:
    """Return a parser with a few options of LightningCLI, whose own parser takes seconds to build."""
    parser = argparse.ArgumentParser()
    for name in _FIT:
        parser.add_argument(f"--{name}")
    return parser


def _complete(action: Any, *, dashes: bool, file: Any) -> None:
    """Give an option or argument of a parser that is never run its values, and the first sentence of its help."""
    if dashes:
        action.option_strings = list(dict.fromkeys(option.replace("_", "-") for option in action.option_strings))
    if action.help != argparse.SUPPRESS:
        action.help = re.split(r"(?<=[.;]) |\n", (action.help or "").strip())[0].rstrip(".;").replace("%", "%%")
    placeholder = re.fullmatch(r"\{(.+)\}", action.metavar if isinstance(action.metavar, str) else "")
    if placeholder is not None:  # how jsonargparse keeps the allowed values
        action.choices = placeholder[1].split(",")
    if action.dest in _PRECISION and action.nargs != 0:
        action.choices = list(precisions.TABLE)
    if action.dest in _FILE:
        action.complete = file
