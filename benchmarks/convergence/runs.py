"""Train what is asked for with the engine of ``lowprec compare``, one fresh process per run, and keep every result.

``runs.jsonl`` has one line per finished run, so that a call goes on where an earlier call ended.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import statistics
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tqdm import tqdm
from typing_extensions import override

from benchmarks.convergence.digits import VAL_BATCH
from benchmarks.convergence.precisions import BASELINE, Precisions
from benchmarks.convergence.subjects import Subject
from lightning_lowprec.tools.compare import runner
from lightning_lowprec.tools.compare.result import PrecisionResult
from lightning_lowprec.tools.compare.spec import CompareSpec
from lightning_lowprec.tools.compare.training import fit

FILE = "runs.jsonl"
LOGS = "logs"
BLOCK = 10
"""Training losses of so many steps are recorded as one mean."""
VALIDATIONS = 2
"""Validations of a run, the last one after the last step."""
PRELOADED = (
    "lightning", "lightning_lowprec.tools.compare.training", "torchao.float8", "torchao.prototype.mx_formats",
    "torchao.prototype.quantized_training", "torchao.optim", "torch._dynamo", "peft",
    "transformers.models.llama.modeling_llama", "transformers.models.vit.modeling_vit",
    "benchmarks.convergence.models", "benchmarks.convergence.text", "benchmarks.convergence.devices",
)  # fmt: skip
"""What takes long to import: processes are forked from one that has it. Nothing of this trains or seeds anything.
The last one adds names."""

Key = tuple[str, str, int]
"""Subject, precision, seed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run: ``base`` is the file with the weights that a fine-tune begins with, in ``work``."""

    subject: Subject
    precision: str
    seed: int
    work: Path

    @property
    def key(self) -> Key:
        """What the run is known by."""
        return self.subject.key, self.precision, self.seed

    @property
    def base(self) -> Path | None:
        """The file with the weights that a fine-tune begins with."""
        return None if self.subject.base is None else self.work / f"{self.subject.key}-{self.seed}.pt"

    def spec(self) -> CompareSpec:
        """Return the run as a comparison of one precision."""
        subject = self.subject
        batch = subject.data_args["batch_size"]
        base = {} if self.base is None else {"base": str(self.base)}
        if subject.reads_text:
            val_batches = subject.data_args["val_windows"] // batch
        else:
            val_batches = -(-subject.data_args["val_pictures"] // (VAL_BATCH * batch))
        return CompareSpec(
            precisions=(self.precision,),
            model=subject.model,
            model_args={**subject.model_args, **base},
            data=subject.data,
            data_args=subject.data_args,
            max_steps=subject.steps,
            val_every=max(1, subject.steps // VALIDATIONS),
            val_batches=val_batches,
            accelerator="cpu",
            out=self.work / LOGS / f"{subject.key}-{self.seed}",
        )


def tasks(subjects: Sequence[Subject], precisions: Precisions, seeds: int, work: Path) -> list[Task]:
    """Return every run: all subjects and precisions with seed 0, then with the next, so that an early end has pairs."""
    return [
        Task(subject=subject, precision=name, seed=seed, work=work)
        for seed in range(seeds)
        for subject in subjects
        for name in subject.chosen(precisions)
    ]


class Runs:
    """The finished runs in a folder. The first line has the settings, which must be those of the new runs.

    Raises:
        ValueError: the folder has runs with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], commit: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        lines = list(self._whole_lines())
        wanted = json.loads(json.dumps(settings))
        before = lines[0]["settings"] if lines else wanted
        differ = sorted(name for name in before.keys() | wanted.keys() if before.get(name) != wanted.get(name))
        if differ:
            raise ValueError(
                f"{self.path} has runs with other settings ({', '.join(differ)}), which cannot be compared with new"
                " runs. Give another folder by --out, or --force to delete these runs."
            )
        self.lines = lines or [{"settings": wanted}]
        if not lines:
            self._write(self.lines[0])
        if commit not in self.of("commit"):
            self.add("commit", commit)

    def of(self, kind: str) -> list[Any]:
        """Return what was added of a kind: ``run``, ``base``, ``commit`` or ``seconds``."""
        return [line[kind] for line in self.lines if kind in line]

    def add(self, kind: str, value: Any) -> None:
        """Keep a value."""
        self.lines.append({kind: value})
        self._write(self.lines[-1])

    @property
    def by_key(self) -> dict[Key, dict[str, Any]]:
        """The finished runs."""
        return {(run["subject"], run["precision"], run["seed"]): run for run in self.of("run")}

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _whole_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines, and cut off a last line that was not written to its end."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")
        yield from map(json.loads, whole.splitlines())


def train_all(todo: Sequence[Task], runs: Runs, workers: int) -> None:
    """Train what is not there yet, some runs at a time, one thread each."""
    finished = runs.by_key
    left = [task for task in todo if task.key not in finished]
    begun = time.monotonic()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    multiprocessing.set_forkserver_preload([*PRELOADED])
    runner.START = "forkserver"
    for task in {task.base: task for task in left if task.base is not None}.values():
        _add_base(runs, task)
    bar = tqdm(total=len(left), desc="training", unit="run", dynamic_ncols=True, disable=not sys.stderr.isatty())
    with bar, ThreadPoolExecutor(workers) as pool:
        try:
            for done in as_completed([pool.submit(record, task) for task in left]):
                runs.add("run", done.result())
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            runs.add("seconds", round(time.monotonic() - begun, 1))


def record(task: Task) -> dict[str, Any]:
    """Train as ``lowprec compare`` does, and return what is written down about the run; a failure says why."""
    spec = task.spec()
    spec.out.mkdir(parents=True, exist_ok=True)
    result = runner.run_one(spec, task.precision, task.seed, progress=False)
    return {
        "subject": task.subject.key,
        "precision": task.precision,
        "seed": task.seed,
        "val_loss": result.final_val,
        "val_accuracy": None,
        "val_losses": result.val_losses,
        "val_steps": result.val_steps,
        "train_losses": means(result.train_losses),
        "digest": digest([*result.train_losses, *result.val_losses]),
        "notes": result.notes,
        "error": None if result.error is None else result.error.strip().rpartition("\n")[2],
    }


def means(losses: Sequence[float]) -> list[float]:
    """Return the mean of each ``BLOCK`` losses."""
    return [round(statistics.fmean(losses[i : i + BLOCK]), 5) for i in range(0, len(losses), BLOCK)]


def digest(losses: Sequence[float]) -> str:
    """Return a hash of losses that two runs share only if all their losses are the same, bit for bit."""
    return hashlib.sha256(struct.pack(f"<{len(losses)}d", *losses)).hexdigest()[:16]


def _add_base(runs: Runs, task: Task) -> None:
    """Train the weights that a fine-tune begins with, in float32, in this process: they are temporary.

    Raises:
        RuntimeError: an earlier call got other weights from the same seed.
    """
    subject, path = task.subject.base, task.base
    assert subject is not None
    assert path is not None
    spec = Task(subject=subject, precision=BASELINE, seed=task.seed, work=task.work).spec()
    result = PrecisionResult(name=BASELINE, seed=task.seed)
    fit(spec, BASELINE, task.seed, result.add, [_Keep(path)])
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    base = {"subject": task.subject.key, "seed": task.seed, "val_loss": result.final_val, "sha256": sha256}
    before = [known for known in runs.of("base") if (known["subject"], known["seed"]) == (base["subject"], task.seed)]
    if not before:
        runs.add("base", base)
    elif before[0]["sha256"] != sha256:
        raise RuntimeError(
            f"The base weights of {base['subject']} with seed {task.seed} are not those of the runs in {runs.path}:"
            " this machine does not repeat its results. Give another folder by --out."
        )


class _Keep(L.Callback):
    """Writes the weights of the Llama after the last step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save(pl_module.llama.state_dict(), self.path)
