"""Compare precisions from Python, by classes or class paths."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_lowprec.other_stacks import unknown_option
from lightning_lowprec.tools.compare import runner
from lightning_lowprec.tools.compare.shown_comparison import ShownComparison
from lightning_lowprec.tools.compare.spec import DEFAULT_PRECISIONS, CompareSpec

DEMO = "lightning_lowprec.tools.demo"
"""The module of the model and the data that are compared if none are given."""


def compare(
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    model: str | type = f"{DEMO}.ByteGPT",
    data: str | type = f"{DEMO}.StdlibText",
    *,
    out: str | Path = "lowprec-compare",
    progress: bool = True,
    **settings: Any,
) -> ShownComparison:
    """Train one model under several precisions, with the same data and the same seed: ``lowprec compare``.

    Each precision trains in a process of its own. A notebook shows the result as a table with the picture of the
    losses; a precision that fails does not stop the others, and the result says why it failed.

    Args:
        precisions: names for ``Trainer(precision=...)``; the first is the baseline.
        model: a LightningModule: a class of a module, or ``"package.module.Class"`` or ``"path/to/file.py:Class"``.
        data: a LightningDataModule, written like the model.
        out: folder for the report, the picture, the figures and the logs.
        progress: whether a bar per precision is shown on stderr.
        settings: what ``lowprec compare`` takes as options, with underscores: ``model_args={"depth": 2}``,
            ``max_steps=100``, ``seeds=3``, ``force=True``.

    Raises:
        ValueError: a precision or a setting is not valid, or the class is not in a module; or ``out`` holds a report,
            and ``force=True`` is not given.
        TypeError: there is no such setting.
        ImportError: a class does not import, or matplotlib is not installed.
        OSError: the folder cannot be written.
    """
    options = [field.name for field in fields(CompareSpec)]
    for name in settings.keys() - set(options):
        raise unknown_option("compare", name, options)
    spec = CompareSpec(
        precisions=list(precisions), model=_path("model", model), data=_path("data", data), out=Path(out), **settings
    )
    return runner.compare(spec, progress=progress)


def _path(name: str, given: str | type) -> str:
    """Return the class path of a class that another process can import."""
    if isinstance(given, str):
        return given
    if not inspect.isclass(given):
        raise ValueError(
            f"`{name}={given!r}` is not valid; expected a class or its path, such as 'my.Model': each precision makes"
            f" an instance. Give the arguments of the class by `{name}_args`."
        )
    if given.__module__ == "__main__" or "." in given.__qualname__:
        raise ValueError(
            f"`{name}={given!r}` is not valid: each precision trains in a process of its own, which cannot import this"
            f" class. Write the class into a file, and give 'file.py:{given.__name__}'."
        )
    return f"{given.__module__}.{given.__name__}"
