"""One run: train one model under one precision with one seed, as ``lowprec compare`` does, and return its record."""

from __future__ import annotations

import hashlib
import logging
import statistics
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from benchmarks.convergence.corpus import Corpus
from benchmarks.convergence.digits import VAL_BATCH
from benchmarks.convergence.precisions import BASELINE
from benchmarks.convergence.subjects import Subject
from lightning_lowprec.tools.compare.result import PrecisionResult
from lightning_lowprec.tools.compare.spec import CompareSpec
from lightning_lowprec.tools.compare.training import fit

BLOCK = 10
"""Training losses of so many steps are recorded as one mean."""
LOGGERS = ("lightning.fabric", "lightning.pytorch")
"""The loggers of which one gets the messages of the precisions: the one that was imported last."""
VALIDATIONS = 2
"""Validations of a run, the last one after the last step."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run to do.

    Args:
        subject: the model and its data.
        precision: the name for ``Trainer(precision=...)``.
        seed: the seed of weights and batches.
        corpus: the text.
        base: for a fine-tune, the file with the weights that it begins with.
    """

    subject: Subject
    precision: str
    seed: int
    corpus: Corpus
    base: Path | None = None

    def spec(self) -> CompareSpec:
        """Return the run as a comparison of one precision on one thread."""
        subject = self.subject
        data_args = dict(subject.data_args)
        if subject.reads_text:
            data_args["path"] = str(self.corpus.path)
            data_args |= {part: list(self.corpus.span(part, subject.text)) for part in ("train", "val")}
        base = {} if self.base is None else {"base": str(self.base)}
        held = data_args["val_windows" if subject.reads_text else "val_pictures"]
        return CompareSpec(
            precisions=(self.precision,),
            model=subject.model,
            model_args={**subject.model_args, **base},
            data=subject.data,
            data_args=data_args,
            max_steps=subject.steps,
            val_every=max(1, subject.steps // VALIDATIONS),
            val_batches=-(-held // (VAL_BATCH * data_args["batch_size"])),
            accelerator="cpu",
            threads=1,
        )


class Collected:
    """Keeps the figures of a training."""

    def __init__(self, result: PrecisionResult) -> None:
        self.result = result

    def send(self, message: dict[str, Any], /) -> None:
        """Add the figures of one message."""
        self.result.add(message)


class Accuracy(L.Callback):
    """Keeps the last ``val_accuracy``, if the model logs one."""

    value: float | None = None

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if "val_accuracy" in trainer.callback_metrics:
            self.value = float(trainer.callback_metrics["val_accuracy"])


class Notes(logging.Handler):
    """Keeps what a precision says about itself: ``fp8-hybrid: converted 8 of 9 linear layers ...``."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.start = f"{precision}: "
        self.found: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith(self.start):
            self.found.append(message.removeprefix(self.start))


def record(task: Task) -> dict[str, Any]:
    """Train, and return what is written down about the run; a run that fails says why."""
    begun = time.process_time()
    result, accuracy, notes = PrecisionResult(name=task.precision, seed=task.seed), Accuracy(), Notes(task.precision)
    for logger in LOGGERS:
        logging.getLogger(logger).addHandler(notes)
    try:
        fit(task.spec(), task.precision, task.seed, Collected(result), [accuracy])
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        result.error = f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        for logger in LOGGERS:
            logging.getLogger(logger).removeHandler(notes)
    return {
        "subject": task.subject.key,
        "precision": task.precision,
        "seed": task.seed,
        "val_loss": result.final_val,
        "val_accuracy": accuracy.value,
        "val_losses": result.val_losses,
        "val_steps": result.val_steps,
        "train_losses": means(result.train_losses),
        "digest": digest([*result.train_losses, *result.val_losses]),
        "cpu_seconds": round(time.process_time() - begun, 2),
        "notes": notes.found,
        "error": result.error,
    }


def means(losses: Sequence[float]) -> list[float]:
    """Return the mean of each ``BLOCK`` losses."""
    return [round(statistics.fmean(losses[i : i + BLOCK]), 5) for i in range(0, len(losses), BLOCK)]


def digest(losses: Sequence[float]) -> str:
    """Return a hash of losses that two runs share only if all their losses are the same, bit for bit."""
    return hashlib.sha256(struct.pack(f"<{len(losses)}d", *losses)).hexdigest()[:16]


def train_base(subject: Subject, seed: int, corpus: Corpus, path: Path) -> dict[str, Any]:
    """Train the weights of a fine-tune in float32, write them to ``path``, and return their validation loss."""
    spec = Task(subject=subject, precision=BASELINE, seed=seed, corpus=corpus).spec()
    result, keep = PrecisionResult(name=BASELINE, seed=seed), _Keep(path)
    fit(spec, BASELINE, seed, Collected(result), [keep])
    return {"seed": seed, "val_loss": result.final_val, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16]}


class _Keep(L.Callback):
    """Writes the weights of the Llama after the last step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save(pl_module.llama.state_dict(), self.path)


def settings(subject: Subject) -> dict[str, Any]:
    """Return the settings of a subject as JSON has them."""
    return asdict(subject)
