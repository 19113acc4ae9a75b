"""What ``lowprec run`` starts in every process: register the names, then run the user's script as ``__main__``."""

from __future__ import annotations

import os
import runpy
import sys

import lightning_lowprec  # noqa: F401  # registers the names

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
