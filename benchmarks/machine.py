"""The commit and the versions that figures were taken with."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMIT = "LOWPREC_COMMIT"
"""Environment variable that names the commit where the tree travels without its ``.git``."""


def commit() -> str:
    """The commit of this tree, ``+`` if files differ from it."""
    given = os.environ.get(COMMIT)
    if given:
        return given
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return f"unknown (no git here; set {COMMIT})"


def _git(*args: str) -> str:
    result = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    return result.stdout.strip()


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of packages, None for one that is not installed."""
    installed = {name: found.version for name in packages for found in distributions(name=name)}
    return {name: installed.get(name) for name in packages}
