"""Runs Python programs as ``python ARGUMENTS`` would, in processes that need not import torch and Lightning first.

What a start from nothing shows (what an import loads, what a launcher starts) needs a real ``python``.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fsdp2.ranks import server


def python(
    *arguments: str, cwd: Path, environ: dict[str, str], seconds: float = 240
) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m MODULE ...``, ``python -c CODE`` or ``python FILE ...`` and return how it ended and what it said.

    Args:
        arguments: of Python.
        cwd: the working folder.
        environ: the environment. The server has read ``OMP_NUM_THREADS`` already.
        seconds: raise ``TimeoutError`` after so many.
    """
    with TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = server().Process(target=_main, args=(arguments, cwd, environ, files))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{arguments} did not end: {files[1].read_text()[-3000:]}")
        return subprocess.CompletedProcess(arguments, process.exitcode, *(file.read_text() for file in files))


def _main(arguments: Sequence[str], cwd: Path, environ: dict[str, str], files: Sequence[Path]) -> None:
    for stream, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= environ
    sys.path[:0] = environ["PYTHONPATH"].split(os.pathsep)
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
