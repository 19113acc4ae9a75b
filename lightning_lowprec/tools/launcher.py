"""``lowprec run --precision=NAME SCRIPT``: launch a command in processes that know our names.

Lightning's launcher starts this file in every process, with the user's command and its arguments behind it.
"""

import argparse
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from lightning_lowprec.tools.class_path import load_package


def run(args: argparse.Namespace) -> int:
    """Launch a command with Lightning's own launcher; the Trainer gets the same defaults as Fabric."""
    if not Path(args.script).is_file() and console_command(args.script) is None:
        other = shutil.which(args.script)
        hint = f" ({other} is there, and belongs to another environment, or is no Python.)" if other else ""
        raise ValueError(
            f"`script={args.script!r}` is not a file and no console command of this Python; expected the path of a"
            f" Python script, or a command that a package installs, such as 'litgpt'.{hint}"
        )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from lightning_lowprec.private.either import fabric_cli
    from lightning_lowprec.registration import LAUNCHED_PRECISION

    if args.precision is not None:
        os.environ[LAUNCHED_PRECISION] = args.precision
        os.environ.pop("LT_PRECISION", None)
    for name in ("accelerator", "strategy", "devices", "num_nodes", "precision"):
        if getattr(args, name) is not None:
            os.environ[f"PL_TRAINER_{name.upper()}"] = str(getattr(args, name))
    command = [args.script, *args.arguments]
    args.script, args.precision = __file__, None  # Fabric would raise where the script asks for another precision
    try:
        fabric_cli.main(args, command)
    except ChildFailedError as error:  # the process has printed its traceback
        rank, failure = error.get_first_failure()
        print(f"lowprec run: {command[0]} ended with exit code {failure.exitcode} on rank {rank}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def console_command(name: str) -> EntryPoint | None:
    """Return the entry point of a command that an installed package has, such as ``litgpt``."""
    return next(iter(entry_points(group="console_scripts", name=name)), None)


# ---- in every process


def _call(self: Any, function: Callable[..., Any] | None = None, *args: object, **kwargs: object) -> Any:
    """Stand in for ``fabric.launch``: the processes are there already, so only the function is left to call."""
    if function is not None and not callable(function):
        raise TypeError(f"`Fabric.launch(...)` needs to be a callable, but got {function}.")
    return None if function is None else function(self, *args, **kwargs)


def _launch_nothing(user: Any) -> None:
    if user.__name__ == "Fabric":
        user.launch = _call


def _start() -> None:
    load_package()
    from lightning_lowprec import registration

    registration.at_meeting(_launch_nothing)
    sys.argv = sys.argv[1:]
    command = sys.argv[0]
    in_file = Path(command).is_file()
    sys.path[0] = os.path.dirname(os.path.abspath(command)) if in_file else os.getcwd()
    if os.getcwd() not in sys.path:
        sys.path.insert(1, os.getcwd())
    if in_file:
        runpy.run_path(command, run_name="__main__")
    elif (entry_point := console_command(command)) is not None:
        sys.argv[0] = shutil.which(command) or command
        sys.exit(entry_point.load()())


def _warn_of_no_effect() -> None:
    from lightning_lowprec import registration

    asked = os.environ.get(registration.LAUNCHED_PRECISION)
    if asked is not None and not registration.launched_precision_is_used() and os.environ.get("RANK", "0") == "0":
        print(
            f"lowprec run: `--precision={asked}` had no effect: the command made no Trainer and no Fabric.",
            file=sys.stderr,
        )


if __name__ == "__main__":
    try:
        _start()
    except SystemExit as end:  # how console commands end
        if end.code in (None, 0):
            _warn_of_no_effect()
        raise
    _warn_of_no_effect()
