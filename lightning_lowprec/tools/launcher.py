"""``lowprec run --precision=NAME script.py``: launch a script in processes that know the names of this package.

Lightning's launcher starts this file in every process, with the user's script and its arguments behind it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from lightning_lowprec.registration import validate_name

TRAINER_DEFAULTS = ("accelerator", "strategy", "devices", "num_nodes", "precision")


def run(argv: list[str]) -> int:
    """Launch a script with ``lightning.fabric.cli.main``; the Trainer gets the same defaults as Fabric."""
    args = _parser().parse_args(argv)
    if not Path(args.script).is_file():
        raise ValueError(f"`script={args.script!r}` is not a file; expected the path of a Python script.")
    if args.precision is not None:
        validate_name(args.precision)
    for name in TRAINER_DEFAULTS:
        if getattr(args, name) is not None:
            os.environ[f"PL_TRAINER_{name.upper()}"] = str(getattr(args, name))
    from lightning.fabric.cli import main

    script = [args.script, *args.arguments]
    args.script = __file__
    main(args, script)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lowprec run",
        description="Launch a script that contains a Fabric or a Trainer. Options go before the script; arguments after"
        " the script are the script's own. The options are defaults: if the script asks for another value, the run"
        " raises, or the script wins (for the Trainer's accelerator, strategy and devices).",
    )
    parser.add_argument("--precision", help="a precision of lightning_lowprec or of Lightning")
    parser.add_argument("--accelerator", help="cpu, cuda, gpu, mps, ...")
    parser.add_argument("--strategy", help="for example ddp")
    parser.add_argument("--devices", default="1", help="number of devices, and processes, on this machine")
    parser.add_argument("--num-nodes", "--num_nodes", type=int, default=1, help="number of machines")
    parser.add_argument("--node-rank", "--node_rank", type=int, default=0, help="index of this machine")
    parser.add_argument("--main-address", "--main_address", default="127.0.0.1", help="address of machine 0")
    parser.add_argument("--main-port", "--main_port", type=int, default=29400, help="port on machine 0")
    parser.add_argument("script", help="the Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")  # importing this file has registered the names
