"""Run a command on the null GPU, which is built first if need be.

python -m benchmarks.ledger.launch [--device h200|h200_1tb|h100|b200|rtx5090|rtx4090|a100] COMMAND...
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.ledger.build import CannotBuild, build, packages

DEVICES = ("h200", "h200_1tb", "h100", "b200", "rtx5090", "rtx4090", "a100")


def environment(device: str = "h200") -> dict[str, str]:
    """Return this process's environment, changed so that a child process runs on the null GPU of this kind.

    Raises CannotBuild if the null GPU cannot be built, ValueError for an unknown device.
    """
    if device not in DEVICES:
        raise ValueError(f"device={device!r} is not valid; expected one of: {', '.join(DEVICES)}")
    folder = build()
    root = str(Path(__file__).parents[2])
    return {
        **os.environ,
        "NULLGPU_DEVICE": device,
        "LD_PRELOAD": str(folder / "libnullgpu.so"),
        "LD_LIBRARY_PATH": f"{folder}:{packages() / 'nvidia' / 'cu13' / 'lib'}",
        "TRITON_LIBCUDA_PATH": str(folder),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "LOWPREC_NO_VALUES": "1",  # what a GPU computes is not there: checks of values are off
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }


def main(arguments: list[str]) -> None:
    """Replace this process by the command."""
    parser = argparse.ArgumentParser(description="Run a command on the null GPU.")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(arguments)
    if not chosen.command:
        parser.error("no command")
    try:
        os.execvpe(chosen.command[0], chosen.command, environment(chosen.device))
    except CannotBuild as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
