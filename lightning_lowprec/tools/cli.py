"""The ``lowprec`` command: each subcommand parses its own arguments."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pickle import UnpicklingError
from typing import Any, Final, final

from lightning_lowprec.extras import quiet
from lightning_lowprec.tools import completion
from lightning_lowprec.tools.class_path import import_from_working_folder, module_paths
from lightning_lowprec.tools.guide import READER_ENDED, STOPPED, exit_codes, guide
from lightning_lowprec.tools.terminal import paint
from lightning_lowprec.version import __version__

COMMANDS = {
    "doctor": "show which precisions run on this machine, why others do not, and what to install",
    "plan": "show which layers of a model would run in FP8, why others would not, and the FLOPs and bytes",
    "compare": "train one model under several precisions and report losses, times and memory side by side",
    "monitor": "draw what a NumericsMonitor has written, and print the layers that FP8 serves worst",
    "export": "write the plain weights of a checkpoint, or a folder that transformers and vLLM load",
    "fit": "run LightningCLI's fit for any LightningModule, with all names in --trainer.precision",
    "run": "launch a Fabric or Trainer script with a precision, in one process or several",
}
MODULES = {
    "doctor": "doctor",
    "plan": "planning.command",
    "compare": "compare.command",
    "monitor": "monitor.command",
    "export": "export",
    "run": "launcher",
}
"""The module whose ``run`` takes the arguments of a command."""
MODES: Final[Mapping[str, Sequence[list[str]]]] = {"export": ([], ["--format"])}
"""For a command with several parsers, the arguments that choose each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv:
        print(guide(__version__))
        return 0
    args = _parser().parse_args(argv)
    debug = args.debug
    if args.command != "run" and "--debug" in args.arguments:  # arguments of `run` may be those of the script
        args.arguments.remove("--debug")
        debug = True
    import_from_working_folder()
    try:
        with quiet():
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
        + "\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items()),
        epilog=f"{exit_codes()}\n\n`lowprec COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument(
        "--completion", choices=completion.SHELLS, action=_Complete, help="print a script that completes lowprec"
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def completion_script(shell: completion.Shell) -> str:
    """Return the script that completes ``lowprec`` in a shell. The parsers of all commands are imported."""
    return completion.script(shell, {name: (words, MODES.get(name, ([],))) for name, words in COMMANDS.items()}, _run)


@final
class _Complete(argparse.Action):
    """Print the completion script and end."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:
        """Write to stdout; without shtab, say what to install."""
        try:
            print(completion_script(values))
        except ImportError as error:
            parser.error(str(error))
        parser.exit()


def _run(command: str, arguments: list[str]) -> int:
    if command == "fit":
        try:
            arguments = module_paths(arguments)
        except ValueError as error:
            return _refuse(command, error)
        return _fit(arguments)
    module = importlib.import_module(f"lightning_lowprec.tools.{MODULES[command]}")
    status: int = module.run(arguments if command == "run" else with_underscores(arguments))
    return status


def _refuse(command: str, error: Exception) -> int:
    print(f"lowprec {command}: {paint('error:', 'red', sys.stderr)} {error}", file=sys.stderr)
    print(f"`lowprec --debug {command} ...` shows the traceback.", file=sys.stderr)
    return 2


def with_underscores(argv: Sequence[str]) -> list[str]:
    """Write ``--max-steps=5`` as ``--max_steps=5``, because jsonargparse names options after arguments and fields."""
    return [re.sub(r"^--[^=]+", lambda option: "--" + option[0][2:].replace("-", "_"), arg) for arg in argv]


def _fit(args: list[str]) -> int:
    """Run stock LightningCLI, whose warning that arguments are given twice is about this function and not the user."""
    from lightning.pytorch.cli import LightningCLI

    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run from within Python")
    LightningCLI(args=["fit", *args], parser_kwargs={"prog": "lowprec"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
