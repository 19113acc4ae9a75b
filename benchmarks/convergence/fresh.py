"""Call a function in a fresh process that has its imports already: forked from a server that imported them once.

A run must not depend on the runs before it, and a process of its own is the simplest way to that. Imports take six
seconds; a fork of a process that has imported everything takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = (
    "lightning", "lightning_lowprec.tools.compare.training", "torchao.float8", "torchao.prototype.mx_formats",
    "torchao.prototype.quantized_training", "torchao.optim", "torch._dynamo", "peft",
    "transformers.models.llama.modeling_llama", "transformers.models.vit.modeling_vit",
    "benchmarks.convergence.llama", "benchmarks.convergence.gpt", "benchmarks.convergence.vision",
    "benchmarks.convergence.windows", "benchmarks.convergence.training",
)  # fmt: skip
"""What takes long to import. Nothing of this trains or seeds anything at import."""


def context(start: str = "forkserver") -> Any:
    """Return the way in which processes start.

    The processes have one thread each. Threads that spin while they wait would be ten times slower on a busy machine.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    found: Any = multiprocessing.get_context(start)
    if start == "forkserver":
        found.set_forkserver_preload([*PRELOADED])
    return found


def call(started: Any, log: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns in a process of its own, whose stderr goes to ``log``.

    Raises:
        RuntimeError: the process ended without a result; the message has the last lines of the log.
    """
    receiver, sender = started.Pipe(duplex=False)
    process = started.Process(target=_answer, args=(sender, log, function, args), daemon=True)
    process.start()
    sender.close()  # the process has its own end; without ours, the pipe ends when the process ends
    with contextlib.suppress(EOFError):
        answer = receiver.recv()
        process.join()
        return answer
    process.join()
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:] if log.exists() else []
    raise RuntimeError("\n".join([f"A process ended with status {process.exitcode}; the end of {log}:", *tail]))


def _answer(sender: Connection, log: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    warnings.simplefilter("ignore")  # advice about data loaders, once per run
    try:
        sender.send(function(*args))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
