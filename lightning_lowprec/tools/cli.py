"""The ``lowprec`` command: each subcommand parses its own arguments."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence

from lightning_lowprec import __version__

COMMANDS = {
    "doctor": "show which precisions run on this machine, why others do not, and what to install",
    "plan": "show which layers of a model would run in FP8, why others would not, and the FLOPs and bytes",
    "compare": "train one model under several precisions and report losses, times and memory side by side",
    "export": "write the plain weights of a checkpoint of any precision",
    "fit": "run LightningCLI's fit for any LightningModule, with all names in --trainer.precision",
    "run": "launch a Fabric or Trainer script with a precision, in one process or several",
}
MODULES = {
    "doctor": "doctor",
    "plan": "planning.command",
    "compare": "compare.command",
    "export": "export",
    "run": "launcher",
}
"""The module whose ``run`` takes the arguments of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="lowprec",
        description="Low-precision training for Lightning and Fabric.\n\n"
        + "\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items()),
        epilog="`lowprec COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    if args.command == "fit":
        return _fit(args.arguments)
    module = importlib.import_module(f"lightning_lowprec.tools.{MODULES[args.command]}")
    arguments = args.arguments if args.command == "run" else with_underscores(args.arguments)
    try:
        status: int = module.run(arguments)
    except (ValueError, ImportError) as error:
        print(f"lowprec {args.command}: error: {error}", file=sys.stderr)
        return 2
    return status


def with_underscores(argv: Sequence[str]) -> list[str]:
    """Write ``--max-steps=5`` as ``--max_steps=5``, because jsonargparse names options after arguments and fields."""
    return [re.sub(r"^--[^=]+", lambda option: "--" + option[0][2:].replace("-", "_"), arg) for arg in argv]


def _fit(args: list[str]) -> int:
    """Run stock LightningCLI; an error may come from the user's own model and keeps its traceback."""
    from lightning.pytorch.cli import LightningCLI

    LightningCLI(args=["fit", *args], parser_kwargs={"prog": "lowprec"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
