"""``lowprec COMMAND ...``: each command parses its own arguments."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from lightning_lowprec import __version__

COMMANDS = {
    "doctor": "show which precisions run on this machine, why others do not, and what to install",
    "plan": "show which layers of a model would run in FP8, why others would not, and the FLOPs and bytes",
    "compare": "train one model under several precisions and report losses, times and memory side by side",
    "export": "write the plain weights of a checkpoint of any precision",
    "fit": "run LightningCLI's fit for any LightningModule, with all names in --trainer.precision",
    "run": "launch a Fabric or Trainer script with a precision, in one process or several",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["fit"]:
        return _fit(args)
    if args and args[0] in COMMANDS:
        return _run(args[0], args[1:])
    parser = ArgumentParser(
        prog="lowprec", description="Low-precision training for Lightning and Fabric.", version=__version__
    )
    commands = parser.add_subcommands(title="commands", description="`lowprec COMMAND --help` shows its options")
    for name, text in COMMANDS.items():
        commands.add_subcommand(name, ArgumentParser(), help=text)
    if not args:
        parser.print_help()
        return 2
    parser.parse_args(args)  # prints help or an error, and exits
    return 2


def _fit(args: list[str]) -> int:
    """Run stock LightningCLI; an error may come from the user's own model and keeps its traceback."""
    from lightning.pytorch.cli import LightningCLI

    LightningCLI(args=args, parser_kwargs={"prog": "lowprec"})
    return 0


def _run(command: str, args: list[str]) -> int:
    module = importlib.import_module(f"lightning_lowprec.tools.cli.{command}")
    try:
        status: int = module.run(args)
    except (ValueError, ImportError) as error:
        print(f"lowprec {command}: error: {error}", file=sys.stderr)
        return 2
    return status
