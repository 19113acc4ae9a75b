"""``lowprec COMMAND ...``: each command parses its own arguments."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from lightning_lowprec import __version__

COMMANDS = {
    "doctor": "what this machine can run, why not, and what to install",
    "plan": "which layers of a model would run in FP8, why not, and what that means in FLOPs and bytes",
    "compare": "train one model under several precisions and report losses, times and memory side by side",
    "export": "write the plain weights of a checkpoint of any precision",
    "fit": "LightningCLI's fit for any LightningModule, with the names of this package in --trainer.precision",
    "run": "launch a Fabric or Trainer script with a precision, in one process or several",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in COMMANDS:
        return _run(args[0], args[1:])
    parser = ArgumentParser(
        prog="lowprec", description="Low-precision training for Lightning and Fabric.", version=__version__
    )
    commands = parser.add_subcommands(title="commands", description="`lowprec COMMAND --help` tells more")
    for name, text in COMMANDS.items():
        commands.add_subcommand(name, ArgumentParser(), help=text)
    if not args:
        parser.print_help()
        return 2
    parser.parse_args(args)  # prints help or an error, and exits
    return 2


def _run(command: str, args: list[str]) -> int:
    module = importlib.import_module(f"lightning_lowprec.tools.cli.{command}")
    try:
        status: int = module.run(args)
    except (ValueError, ImportError) as error:
        if command == "fit":
            raise  # it may come from the user's own model: keep the traceback
        print(f"lowprec {command}: error: {error}", file=sys.stderr)
        return 2
    return status
