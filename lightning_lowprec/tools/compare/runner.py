"""``lowprec compare``, from a shell and from Python: train the precisions, each in a fresh process, and report."""

import inspect
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from lightning_lowprec.extras import require
from lightning_lowprec.names import validate_name
from lightning_lowprec.other_stacks import unknown_option
from lightning_lowprec.tools.class_path import load_class
from lightning_lowprec.tools.compare.comparison import REPORT, Comparison, verdict_on_all, write_report
from lightning_lowprec.tools.compare.result import PrecisionResult
from lightning_lowprec.tools.compare.spec import DEFAULT_PRECISIONS, CompareSpec
from lightning_lowprec.tools.compare.training import train
from lightning_lowprec.tools.output import prints_to_stderr, working

ERROR_LINES = 12
START = "spawn"
"""How a process starts: from nothing, as the figures of a precision must not depend on the one before."""
DEMO = "lightning_lowprec.tools.demo"


def run(args: Any) -> int:
    """Train, then print the table and the path of the report; return 1 if a precision failed or is off the baseline."""
    with prints_to_stderr(wanted=args.json):
        comparison = train_all(args.spec)
    status = 0 if comparison.ok else 1
    if args.json:
        print(comparison.to_json(), end="")
    else:
        print(comparison)
        print(comparison.spec.out / REPORT)
        print(f"{verdict_on_all(comparison)} The exit status is {status}.")
        if comparison.spec.model.startswith(DEMO):
            from lightning_lowprec.tools.demo import NEXT

            print(NEXT)
    return status


def compare(
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    model: str | type = f"{DEMO}.ByteGPT",
    data: str | type = f"{DEMO}.StdlibText",
    *,
    out: str | Path = "lowprec-compare",
    progress: bool = True,
    **settings: Any,
) -> Comparison:
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
    return train_all(spec, progress=progress)


def _path(name: str, cls: str | type) -> str:
    if isinstance(cls, str):
        return cls
    if not inspect.isclass(cls):
        raise ValueError(
            f"`{name}={cls!r}` is not valid; expected a class or its path, such as 'my.Model': each precision makes"
            f" an instance. Give the arguments of the class by `{name}_args`."
        )
    if cls.__module__ == "__main__" or "." in cls.__qualname__:
        raise ValueError(
            f"`{name}={cls!r}` is not valid: each precision trains in a process of its own, which cannot import this"
            f" class. Write the class into a file, and give 'file.py:{cls.__name__}'."
        )
    return f"{cls.__module__}.{cls.__name__}"


def train_all(spec: CompareSpec, *, progress: bool = True) -> Comparison:
    """Train every precision of ``spec``, and write ``report.md``, ``loss.png``, ``results.json`` and the logs."""
    for name in spec.precisions:
        validate_name(name)
    with working("importing the model and the data"):
        require("matplotlib", "`lowprec compare`")
        for path in (spec.model, spec.data):
            load_class(path)
    with _locked(spec.out, force=spec.force):
        results = [run_one(spec, name, seed, progress=progress) for seed, name in spec.runs]
        comparison = Comparison(spec=spec, results=results)
        with working("drawing the report"):
            write_report(comparison)
    return comparison


def _locked(out: Path, *, force: bool) -> AbstractContextManager[Any]:
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(out / ".lowprec-compare.lock").acquire(blocking=False)
    except Timeout as error:
        raise ValueError(
            f"`out={str(out)!r}` is in use: another comparison is running there. Give another folder by `--out`."
        ) from error
    if (out / REPORT).exists() and not force:
        lock.lock.release()
        raise ValueError(
            f"`out={str(out)!r}` holds the report of an earlier comparison. Give another folder by `--out`, or"
            " `--force` to write over the report."
        )
    return lock


def run_one(spec: CompareSpec, name: str, seed: int, *, progress: bool = True) -> PrecisionResult:
    """Train one precision in a fresh process, whose stderr goes to ``<out>/<name>.log`` (``<name>-seed<seed>.log``)."""
    title, log = name, spec.out / f"{spec.stem(name, seed)}.log"
    if spec.seeds > 1:
        title = f"{name}, seed {seed} ({spec.runs.index((seed, name)) + 1} of {len(spec.runs)})"
    log.write_text("", encoding="utf-8")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads are 10 times slower on a busy machine
    context: Any = multiprocessing.get_context(START)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(spec, name, seed, log, sender))
    process.start()
    sender.close()  # the process has its own copy; without ours, the pipe ends when the process ends
    result = PrecisionResult(name=name, seed=seed)
    try:
        _receive(receiver, result, title, spec.max_steps if progress else None)
        process.join()
    finally:
        process.kill()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    result.notes = [line.partition(": ")[2] for line in lines if line.startswith(f"{name}: ")]
    if process.exitcode:
        result.error = _error(process.exitcode, lines)
        tqdm.write(f"{title} failed, its log is {log}:\n{result.error}", file=sys.stderr)
    return result


def _receive(figures: Connection, result: PrecisionResult, title: str, max_steps: int | None) -> None:
    """Add the figures to ``result`` until the process closes the pipe; show them unless ``max_steps`` is None."""
    interval = 0.1 if sys.stderr.isatty() else 10.0  # seconds; few lines in a log file
    look: dict[str, Any] = {"unit": "step", "dynamic_ncols": True, "mininterval": interval}
    with tqdm(total=max_steps, desc=title, disable=max_steps is None, **look) as bar, suppress(EOFError):
        while True:
            message = figures.recv()
            result.add(message)
            if "loss" in message:
                bar.set_postfix(loss=f"{message['loss']:.3f}", refresh=False)
                bar.update(message["step"] - bar.n)
            elif "val" in message:
                bar.set_postfix(val=f"{message['val']:.4f}")


def _error(status: int, lines: list[str]) -> str:
    tail = "\n".join(deque((line for line in lines if line.strip()), ERROR_LINES))
    if status < 0:
        return f"{tail}\nthe process was killed by signal {-status} (9 often means: out of memory)".strip()
    return tail or f"the process ended with status {status} and wrote nothing to stderr"
