"""The ``lowprec`` command: its guide, its exit codes, and the start of every subcommand.

This file imports neither torch nor Lightning.
"""

import argparse
import importlib
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pickle import UnpicklingError
from typing import Final

from lightning_lowprec.gone import COMMANDS as GONE_COMMANDS
from lightning_lowprec.gone import FLAGS, gone
from lightning_lowprec.other_stacks import pointer
from lightning_lowprec.tools.class_path import import_from_working_folder, load_package, module_paths
from lightning_lowprec.tools.output import paint
from lightning_lowprec.tools.parsers import COMMANDS, parse
from lightning_lowprec.version import __version__

GUIDE: Final = (
    ("Which precisions run on this machine?", "lowprec doctor"),
    ("Does one precision run here?", "lowprec doctor --for fp8-hybrid"),
    ("Which layers of my model convert?", "lowprec plan my.Model"),
    ("Which precisions fit into my GPU?", "lowprec plan my.Model --fits H200"),
    ("Does a precision cost me loss?", "lowprec compare --model my.Model --data my.Data"),
    ("Train a LightningModule", "lowprec fit --model my.Model --trainer.precision fp8-hybrid"),
    ("Train by a script of my own", "lowprec run --precision fp8-hybrid train.py"),
    ("Which layers does FP8 serve worst?", "lowprec monitor RUN"),
    ("Write plain weights", "lowprec export last.ckpt weights.safetensors"),
    ("Report a bug", "lowprec doctor --report"),
)
STOPPED: Final = 130
READER_ENDED: Final = 141
EXIT_CODES: Final = {
    0: "the command has done its work, and the answer is yes",
    1: "the answer is no: the precision does not run here, nothing converts or fits, a comparison or check failed;"
    " or an error of your own code under fit and run",
    2: "wrong arguments, or an input that is missing or cannot be read; nothing was changed",
    STOPPED: "stopped by Ctrl-C",
    READER_ENDED: "the program that reads the output has ended, such as head",
}
"""What the exit status of a command means. ``run`` hands on the exit status of the script."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv:
        print(guide())
        return 0
    if answer := gone(argv[0].partition("=")[0], FLAGS):
        print(f"lowprec: {paint('error:', 'red', sys.stderr)} {answer}", file=sys.stderr)
        return 2
    args = _parser().parse_args(argv)
    debug = args.debug
    if args.command != "run" and "--debug" in args.arguments:  # arguments of `run` may be those of the script
        args.arguments.remove("--debug")
        debug = True
    import_from_working_folder()
    try:
        status = _run(args.command, args.arguments)
        sys.stdout.flush()  # here, where a reader that has ended is noticed
        return status
    except KeyboardInterrupt:
        if debug:
            raise
        print(f"\nlowprec {args.command}: stopped", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return READER_ENDED
    except (ValueError, ImportError, OSError, UnpicklingError) as error:
        if debug or (args.command == "fit" and not isinstance(error, OSError)):
            raise  # an error in `fit` may come from the user's own model
        return _refuse(args.command, error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lowprec",
        description="Low-precision training for Lightning and Fabric.\n\n"
        + "\n".join(f"  {name:<8} {options.__doc__.splitlines()[0]}" for name, (_, options, _) in COMMANDS.items()),
        epilog=f"{exit_codes()}\n\n`lowprec COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("command", type=_known_command, choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _known_command(word: str) -> str:
    """Return a command; one that has left, or is misspelt, is an error that says what to write."""
    if answer := gone(word, GONE_COMMANDS) or ("" if word in COMMANDS else pointer(word, {}, COMMANDS)):
        raise argparse.ArgumentTypeError(answer)
    return word


def _run(command: str, arguments: list[str]) -> int:
    if command == "fit":
        try:
            arguments = module_paths(arguments)
        except ValueError as error:
            return _refuse(command, error)
        return _fit(arguments)
    args = parse(command, arguments)
    status: int = importlib.import_module(f"lightning_lowprec.tools.{COMMANDS[command][0]}").run(args)
    return status


def _refuse(command: str, error: Exception) -> int:
    print(f"lowprec {command}: {paint('error:', 'red', sys.stderr)} {error}", file=sys.stderr)
    print(f"`lowprec --debug {command} ...` shows the traceback.", file=sys.stderr)
    return 2


def _fit(args: list[str]) -> int:
    """Run stock LightningCLI, whose warning that arguments are given twice is about this function and not the user."""
    try:
        load_package()
    except ImportError as error:  # no Lightning
        return _refuse("fit", error)
    from lightning_lowprec.private.either import LightningCLI

    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run from within Python")
    LightningCLI(args=["fit", *args], parser_kwargs={"prog": "lowprec"})
    return 0


def guide() -> str:
    """Return the text that ``lowprec`` prints without arguments."""
    width = max(len(question) for question, _ in GUIDE)
    lines = [f"lowprec {__version__}: low-precision training for Lightning and Fabric", ""]
    lines += [f"  {question:<{width}}  {command}" for question, command in GUIDE]
    lines += ["", "`lowprec --help` lists commands and exit codes, `lowprec COMMAND --help` the options of a command."]
    return "\n".join(lines)


def exit_codes() -> str:
    """Return the exit codes as lines for ``--help``."""
    lines = [
        textwrap.fill(meaning, 100, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7)
        for code, meaning in EXIT_CODES.items()
    ]
    return "\n".join(["exit codes:", *lines, "  `lowprec run` ends with the exit code of the script."])


if __name__ == "__main__":
    sys.exit(main())
