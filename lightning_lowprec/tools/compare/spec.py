"""The settings of a comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_lowprec.checks import check_integer
from lightning_lowprec.tools.class_path import check_class_path

DEFAULT_PRECISIONS = ("32-true", "bf16-mixed", "fp8-hybrid")


@dataclass(frozen=True, kw_only=True)
class CompareSpec:
    """One model, one data set, one seed, and the precisions to train them under.

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
        seed: seed of Python, numpy and torch, and of the data if its class takes a ``seed``.
        accelerator: auto, cpu, cuda, ...; one device is used.
        threads: CPU threads of each training; 0 leaves torch's default.
        max_loss_gap: the largest relative difference from the baseline's final validation metric; 0.01 is one percent.
        out: folder for the report, the picture, the figures and the logs.
    """

    precisions: Sequence[str] = DEFAULT_PRECISIONS
    model: str = "lightning_lowprec.tools.demo.ByteGPT"
    model_args: Mapping[str, Any] = field(default_factory=dict)
    data: str = "lightning_lowprec.tools.demo.StdlibText"
    data_args: Mapping[str, Any] = field(default_factory=dict)
    max_steps: int = 200
    val_every: int = 50
    val_batches: int = 20
    val_metric: str = "val_loss"
    seed: int = 0
    accelerator: str = "auto"
    threads: int = 0
    max_loss_gap: float = 0.01
    out: Path = Path("lowprec-compare")

    def __post_init__(self) -> None:
        """Check every field."""
        _check_precisions(self.precisions)
        for name in ("max_steps", "val_every", "val_batches"):
            check_integer(name, getattr(self, name), least=1)
        for name in ("seed", "threads"):
            check_integer(name, getattr(self, name), least=0)
        if not (0 <= self.max_loss_gap < math.inf):
            raise ValueError(
                f"`max_loss_gap={self.max_loss_gap!r}` is not valid; expected 0 or more, e.g. 0.01 for 1 %."
            )
        for name in ("model", "data"):
            check_class_path(name, getattr(self, name))
        for name in ("model_args", "data_args"):
            _check_arguments(name, getattr(self, name))
        for name in ("val_metric", "accelerator"):
            if not getattr(self, name):
                raise ValueError(f"`{name}=''` is not valid; expected a name.")

    @property
    def baseline(self) -> str:
        """The precision that the others are compared with."""
        return self.precisions[0]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"precisions": list(self.precisions), "out": str(self.out)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CompareSpec:
        """Make a spec from the values of ``as_dict``."""
        return cls(**{**values, "out": Path(values["out"])})


def _check_precisions(precisions: object) -> None:
    if isinstance(precisions, str) or not isinstance(precisions, Sequence) or not precisions:
        expected = "expected a list of at least one name, e.g. ['32-true', 'bf16-mixed']"
    elif not all(isinstance(name, str) and name for name in precisions):
        expected = "expected every name to be a non-empty string"
    elif twice := sorted({name for name in precisions if precisions.count(name) > 1}):
        expected = f"expected each name once: remove the repeated {', '.join(twice)}"
    else:
        return
    raise ValueError(f"`precisions={precisions!r}` is not valid; {expected}.")


def _check_arguments(name: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"`{name}={value!r}` is not valid; expected a mapping from argument names to values.")
    try:
        json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`{name}={value!r}` is not valid; expected plain JSON values, because each precision trains in a process"
            f" of its own ({error})."
        ) from error
