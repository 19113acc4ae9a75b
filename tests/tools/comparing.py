"""`lowprec compare` where no process imports torch and Lightning."""

import os
from collections.abc import Sequence
from pathlib import Path

from tests import forked

CODE = """
import sys

from lightning_lowprec.tools.cli import main
from lightning_lowprec.tools.compare import runner

runner.START = "fork"
sys.exit(main(["compare", *sys.argv[1:]]))
"""


def compare(arguments: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Return the status, stdout and stderr of the command; each precision trains in a fork of its process.

    Each precision of `examples/first_steps.ipynb` trains in a process that starts from nothing.
    """
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = forked.python("-c", CODE, *arguments, cwd=folder, environ=environ)
    return ended.returncode, ended.stdout, ended.stderr
