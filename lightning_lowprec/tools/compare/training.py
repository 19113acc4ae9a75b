"""Train one precision in a fresh process, and send the figures to the parent as they arise.

So the allocator, caches and patches of one precision do not affect the next.
"""

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch
from typing_extensions import override

from lightning_lowprec.callbacks import NumericsMonitor
from lightning_lowprec.callbacks.readings import FILE
from lightning_lowprec.extras import import_refusal
from lightning_lowprec.hardware import describe
from lightning_lowprec.private.either import Callback, LightningModule, Trainer, seed_everything
from lightning_lowprec.tools.class_path import build
from lightning_lowprec.tools.compare.spec import CompareSpec

Send = Callable[[dict[str, Any]], object]
SAMPLINGS = 10
"""Samplings of a monitor in a run. They are few, so that the median time of a step does not contain them."""


def train(spec: CompareSpec, precision: str, seed: int, log: Path, figures: Connection) -> None:
    """Train the model of a comparison as :func:`fit` does; stderr goes to ``log``."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    fit(spec, precision, seed, figures.send)


def fit(spec: CompareSpec, precision: str, seed: int, send: Send, callbacks: Sequence[Callback] = ()) -> None:
    """Train the model of a comparison under one precision with one seed.

    Every message is a dict: ``device`` and ``on_cpu``, first; ``loss``, ``seconds`` and ``step`` of a
    training batch; ``val`` of a validation; ``peak_memory``, last and on a GPU only.
    """
    import_refusal("torchao.float8", "FP8")  # now, so that the import counts in no step time
    seed_everything(seed, verbose=False)
    model = build(spec.model, spec.model_args, seed=seed)
    data = build(spec.data, spec.data_args, seed=seed)
    seed_everything(seed, verbose=False)  # again: the constructors may have drawn numbers
    trainer = Trainer(
        precision=precision,  # type: ignore[arg-type]  # names of this package
        accelerator=spec.accelerator,
        devices=1,
        max_steps=spec.max_steps,
        max_epochs=-1,
        val_check_interval=spec.val_every,
        check_val_every_n_epoch=None,  # count batches across epochs
        limit_val_batches=spec.val_batches,
        callbacks=[Recorder(spec, send), *_callbacks(spec, precision, seed), *callbacks],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    device = trainer.strategy.root_device
    on_cpu = device.type == "cpu"
    chip = f"CPU ({platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} cores)"
    send({"device": chip if on_cpu else describe(device), "on_cpu": on_cpu})
    try:
        trainer.fit(model, data)
    finally:
        if device.type == "cuda":
            send({"peak_memory": torch.cuda.max_memory_allocated(device)})


def _callbacks(spec: CompareSpec, precision: str, seed: int) -> list[Callback]:
    callbacks: list[Callback] = []
    if precision in spec.monitored:
        folder = spec.readings(precision, seed)
        (folder / FILE).unlink(missing_ok=True)  # a monitor continues a file
        callbacks.append(NumericsMonitor(every=max(1, spec.max_steps // SAMPLINGS), folder=folder))
    return callbacks


@final
class Recorder(Callback):
    """Send the loss and time of every step and the metric of every validation, and stop after the last step."""

    def __init__(self, spec: CompareSpec, send: Send) -> None:
        self.spec = spec
        self.send = send
        self._started = 0.0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = _loss(outputs)  # reading the loss waits for the GPU, so the time includes the optimizer step
        seconds = time.perf_counter() - self._started
        self.send({"loss": loss, "seconds": seconds, "step": trainer.global_step})
        if not math.isfinite(loss):
            raise FloatingPointError(f"the training loss is {loss} at step {trainer.global_step}")
        if trainer.global_step >= self.spec.max_steps:
            trainer.should_stop = True  # lets Lightning validate after the last step, wherever the interval falls

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name, metrics = self.spec.val_metric, trainer.callback_metrics
        if name not in metrics:
            raise ValueError(
                f"`val_metric={name!r}` was not logged; logged: {', '.join(sorted(metrics)) or 'nothing'}. Name one of"
                " these, or log it in validation_step."
            )
        self.send({"val": float(metrics[name])})


def _loss(outputs: Any) -> float:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if loss is None:
        raise ValueError(
            "training_step returned no loss; expected a tensor or a dict with 'loss' (with manual optimization too),"
            " because the loss is what is compared."
        )
    return float(loss)
