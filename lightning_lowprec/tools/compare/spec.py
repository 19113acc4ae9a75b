"""What a comparison is asked to do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_lowprec.tools.class_path import check_class_path

DEFAULT_PRECISIONS = ("32-true", "bf16-mixed", "fp8-hybrid")


@dataclass(frozen=True, kw_only=True)
class CompareSpec:
    """One model, one data set, one seed, and the precisions to train them under."""

    precisions: Sequence[str] = DEFAULT_PRECISIONS
    """Names for `Trainer(precision=...)`; the first is the baseline."""
    model: str = "lightning_lowprec.tools.demo.ByteGPT"
    """A LightningModule: `package.module.Class` or `path/to/file.py:Class`."""
    model_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model; plain JSON values."""
    data: str = "lightning_lowprec.tools.demo.StdlibText"
    """A LightningDataModule, written like `model`."""
    data_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the data; plain JSON values."""
    max_steps: int = 200
    """Optimizer steps of each training."""
    val_every: int = 50
    """Validate every so many training batches; in any case after the last step."""
    val_batches: int = 20
    """Batches of each validation."""
    val_metric: str = "val_loss"
    """The logged metric that the verdict compares; only its difference from the baseline counts."""
    seed: int = 0
    """Seeds Python, numpy and torch; also passed to `data` if it takes a `seed` and `data_args` has none."""
    accelerator: str = "auto"
    """As in `Trainer(accelerator=...)`; one device."""
    threads: int = 0
    """CPU threads of each training; 0 leaves torch's default."""
    max_loss_gap: float = 0.01
    """Largest relative difference from the baseline's final validation metric, 0.01 is one percent."""
    out: Path = Path("lowprec-compare")
    """Folder for the report, the picture, the figures and the logs."""

    def __post_init__(self) -> None:
        _check_precisions(self.precisions)
        for name in ("max_steps", "val_every", "val_batches"):
            _check_integer(name, getattr(self, name), least=1)
        for name in ("seed", "threads"):
            _check_integer(name, getattr(self, name), least=0)
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
        """The precision that the others are measured against."""
        return self.precisions[0]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"precisions": list(self.precisions), "out": str(self.out)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CompareSpec:
        """The reverse of `as_dict`."""
        return cls(**{**values, "out": Path(values["out"])})


def _check_precisions(precisions: object) -> None:
    if isinstance(precisions, str) or not isinstance(precisions, Sequence) or not precisions:
        raise ValueError(
            f"`precisions={precisions!r}` is not valid; expected a list of at least one name,"
            " e.g. ['32-true', 'bf16-mixed']."
        )
    if not all(isinstance(name, str) and name for name in precisions):
        raise ValueError(
            f"`precisions={list(precisions)!r}` is not valid; expected every name to be a non-empty string."
        )
    twice = sorted({name for name in precisions if precisions.count(name) > 1})
    if twice:
        raise ValueError(
            f"`precisions={list(precisions)!r}` is not valid; expected each name once:"
            f" remove the repeated {', '.join(twice)}."
        )


def _check_integer(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}={value!r}` is not valid; expected an integer of at least {least}.")


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
