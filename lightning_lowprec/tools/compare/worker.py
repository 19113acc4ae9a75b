"""Train one precision: ``python -m lightning_lowprec.tools.compare.worker SPEC.json NAME OUT.json``.

Every precision trains in a fresh process, so that the allocator, caches and patches of one do not affect the next.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

import lightning_lowprec
from lightning_lowprec.extras import import_refusal
from lightning_lowprec.hardware import describe
from lightning_lowprec.tools.class_path import build
from lightning_lowprec.tools.compare.recorder import Recorder
from lightning_lowprec.tools.compare.spec import CompareSpec
from lightning_lowprec.tools.machine import distributions, versions


def main(argv: list[str]) -> None:
    """Train, and write the figures to a file, also if the training raises."""
    spec = CompareSpec.from_dict(json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    recorder = Recorder(spec.val_metric, spec.max_steps)
    try:
        train(spec, argv[1], recorder)
    finally:
        figures = recorder.figures() | environment(recorder.device)
        Path(argv[2]).write_text(json.dumps(figures), encoding="utf-8")


def train(spec: CompareSpec, precision: str, recorder: Recorder) -> None:
    """Train the model of a comparison under one precision; ``recorder`` records the figures."""
    if spec.threads:
        torch.set_num_threads(spec.threads)
    import_refusal("torchao.float8", "FP8")  # for every precision, so that the import counts in no peak memory
    L.seed_everything(spec.seed, verbose=False)
    model = build(spec.model, spec.model_args, L.LightningModule)
    data = build(spec.data, spec.data_args, L.LightningDataModule, seed=spec.seed)
    L.seed_everything(spec.seed, verbose=False)  # again: the constructors may have drawn numbers
    trainer = L.Trainer(precision=precision, callbacks=[recorder], **_trainer_arguments(spec))  # type: ignore[arg-type]
    trainer.fit(model, data)
    if not recorder.train_losses:
        raise RuntimeError(f"no training step ran: {spec.data!r} has no training batches.")
    if not recorder.val_losses:
        raise RuntimeError(
            f"no validation ran, so there is no {spec.val_metric!r}: give the model a validation_step and the data a"
            " val_dataloader."
        )


def environment(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions, as fields of ``PrecisionResult``."""
    packages = versions(["torch", "lightning", *distributions()])
    return {
        "device": describe(device) if device.type != "cpu" else f"CPU ({_cpu()}, {os.cpu_count()} cores)",
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "lightning_lowprec": lightning_lowprec.__version__,
            **{package: found for package, found in packages.items() if found is not None},
        },
    }


def _trainer_arguments(spec: CompareSpec) -> dict[str, Any]:
    return {
        "accelerator": spec.accelerator,
        "devices": 1,
        "max_steps": spec.max_steps,
        "max_epochs": -1,
        "val_check_interval": spec.val_every,
        "check_val_every_n_epoch": None,  # count batches across epochs
        "limit_val_batches": spec.val_batches,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main(sys.argv[1:])
