"""Train all runs, some at a time, each in a fresh process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.convergence import fresh
from benchmarks.convergence.corpus import Corpus
from benchmarks.convergence.journal import Journal
from benchmarks.convergence.precisions import Precisions
from benchmarks.convergence.subjects import Subject
from benchmarks.convergence.training import Task, record, train_base

LOG = "log.txt"


def tasks(subjects: Sequence[Subject], precisions: Precisions, seeds: int, corpus: Corpus, work: Path) -> list[Task]:
    """Return every run: all subjects and precisions with seed 0, then with the next, so that an early end has pairs."""
    return [
        Task(subject=subject, precision=name, seed=seed, corpus=corpus,
             base=None if subject.base is None else base_file(work, subject, seed))
        for seed in range(seeds)
        for subject in subjects
        for name in subject.chosen(precisions)
    ]  # fmt: skip


def base_file(work: Path, subject: Subject, seed: int) -> Path:
    """Return where the weights lie that a fine-tune begins with."""
    return work / f"{subject.key}-{seed}.pt"


def train_all(todo: Sequence[Task], journal: Journal, workers: int, log: Path) -> None:
    """Train what the journal does not have, and write each run to it.

    Weights of bases are trained again in each call: they are temporary, and the journal checks that they are the same.
    """
    left = [task for task in todo if (task.subject.key, task.precision, task.seed) not in journal.runs]
    if not left:
        return
    context, begun = fresh.context(), time.monotonic()
    bases = {task.base: task for task in left if task.base is not None}
    with (
        ThreadPoolExecutor(workers) as pool,
        tqdm(total=len(bases) + len(left), desc="training", unit="run", dynamic_ncols=True,
             disable=not sys.stderr.isatty()) as bar,
    ):  # fmt: skip
        try:
            made = [pool.submit(fresh.call, context, log, train_base, task.subject.base, task.seed, task.corpus, path)
                    for path, task in bases.items()]  # fmt: skip
            for task, facts in zip(bases.values(), _results(made, bar), strict=True):
                journal.add_base({"subject": task.subject.key, **facts})
            runs = [pool.submit(fresh.call, context, log, record, task) for task in left]
            for done in as_completed(runs):
                journal.add_run(done.result())
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            journal.add_seconds(time.monotonic() - begun)


def _results(futures: Iterable[Any], bar: Any) -> list[Any]:
    found = []
    for future in futures:
        found.append(future.result())
        bar.update()
    return found
