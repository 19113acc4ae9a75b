"""The settings of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from lightning_lowprec.checks import Count, Rule, Size, check_fields

DEFAULT_PRECISIONS = ("32-true", "bf16-mixed", "fp8-hybrid")


@dataclass(frozen=True, kw_only=True)
class CompareSpec:
    """One model, one data set, the seeds, and the precisions to train them under.

    Args:
        precisions: names for ``Trainer(precision=...)``; the first is the baseline.
        model: a LightningModule: package.module.Class or path/to/file.py:Class.
        model_args: arguments of the model as JSON or YAML, e.g. '{depth: 2}'.
        data: a LightningDataModule, written like the model.
        data_args: arguments of the data, written like those of the model.
        max_steps: optimizer steps of each training.
        val_every: validate after this many training batches, and after the last step.
        val_batches: batches of each validation.
        val_metric: the logged metric that is compared with the baseline.
        seed: seed of Python, numpy and torch, and of the data if its class takes a seed.
        seeds: train each precision with this many seeds, from `seed` on; from 2, the differences from the baseline have
            95 % confidence intervals. `val_metric` must then be a loss: lower is better.
        accelerator: auto, cpu, cuda, ...; one device is used.
        max_loss_gap: the largest relative difference from the baseline's final validation metric; 0.01 is one percent.
        out: folder for the report, the picture, the figures and the logs.
        force: write over the report of an earlier comparison in this folder.
    """

    precisions: Sequence[str] = DEFAULT_PRECISIONS
    model: str = "lightning_lowprec.tools.demo.ByteGPT"
    model_args: Mapping[str, object] = field(default_factory=dict)
    data: str = "lightning_lowprec.tools.demo.StdlibText"
    data_args: Mapping[str, object] = field(default_factory=dict)
    max_steps: Count = 200
    val_every: Count = 50
    val_batches: Count = 20
    val_metric: str = "val_loss"
    seed: Size = 0
    seeds: Count = 1
    accelerator: str = "auto"
    max_loss_gap: Annotated[float, Rule("0 or more, e.g. 0.01 for 1 %", lambda gap: gap >= 0)] = 0.01
    out: Path = Path("lowprec-compare")
    force: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        twice = sorted({name for name in self.precisions if self.precisions.count(name) > 1})
        if twice:
            raise ValueError(
                f"`precisions={self.precisions!r}` is not valid; expected each name once: remove the repeated"
                f" {', '.join(twice)}."
            )

    @property
    def runs(self) -> list[tuple[int, str]]:
        """Every training, as seed and precision: all precisions with one seed, then with the next."""
        return [(seed, name) for seed in range(self.seed, self.seed + self.seeds) for name in self.precisions]

    @property
    def baseline(self) -> str:
        """The precision that the others are compared with."""
        return self.precisions[0]
