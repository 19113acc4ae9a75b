"""The precisions that train on a CPU here, and the reason for every name that is left out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import lightning as L
import torch

from lightning_lowprec.conversion.name_suffixes import split
from lightning_lowprec.names import OF_LIGHTNING, TABLE
from lightning_lowprec.tools.doctor import availability

BASELINE = "32-true"
FINER = ("64-true",)
"""Lightning's names that round less than the baseline."""
ON = "hopper"
REPRESENTATIVE = "fp8-hybrid"
FAST, PROMOTED = f"{REPRESENTATIVE}@{ON}", f"{REPRESENTATIVE}@{ON}-promoted"
"""Names that :mod:`~benchmarks.convergence.devices` adds: products summed as on this GPU, fast or promoted."""


@dataclass(frozen=True, kw_only=True)
class Precisions:
    """The names to train, the baseline first; why a name is left out; and names that mean another name."""

    names: tuple[str, ...]
    left_out: dict[str, str]
    same: dict[str, str]

    @property
    def without_suffix(self) -> tuple[str, ...]:
        """The names that are no other name with a suffix: ``fp8-hybrid``, but not ``fp8-hybrid-sr``."""
        return tuple(name for name in self.names if not _has_suffix(name))


def on_cpu() -> Precisions:
    """Ask Lightning and this package about each of their names."""
    reasons = {**dict(_of_lightning()), **dict(_of_this_package())}
    names = [name for name, reason in reasons.items() if reason is None and name != BASELINE]
    left_out = {name: reason for name, reason in reasons.items() if reason is not None and reason not in reasons}
    same = {name: reason for name, reason in reasons.items() if reason in reasons}
    return Precisions(names=(BASELINE, *names), left_out=left_out, same=same)


def _of_lightning() -> Iterator[tuple[str, str | None]]:
    """Yield each of Lightning's names, and why it is left out: a reason, or the name that it means; None if it is not.

    On a CPU, Lightning runs ``16-mixed`` as ``bf16-mixed``, with a warning.
    """
    for name in dict.fromkeys(map(str, OF_LIGHTNING)):
        if name in FINER:
            yield name, "Rounds less than the baseline."
            continue
        try:
            with _silence():
                meant = str(L.Trainer(precision=name, accelerator="cpu", logger=False, barebones=True).precision)
        except (ImportError, ValueError, RuntimeError) as error:
            yield name, first_sentence(str(error))
            continue
        yield name, None if meant == name else meant


def _of_this_package() -> Iterator[tuple[str, str | None]]:
    """Yield each name of the table, and why it is left out, in the same way.

    Two names with one plugin and equal options are one precision, which has the first of the names.
    """
    first: dict[str, str] = {}
    for name in TABLE:
        found = availability(name, torch.device("cpu"))
        row = TABLE[name]
        if not found.runs:
            yield name, first_sentence(found.reason)
            continue
        same = first.setdefault(f"{row.plugin.__qualname__} {row.options}", name)
        yield name, None if same == name else same


def first_sentence(text: str) -> str:
    """Return the first sentence of a reason, without the command that would help a user."""
    return text.split(". ")[0].split(": `")[0].strip().rstrip(".") + "."


def _has_suffix(name: str) -> bool:
    return bool(split(name)[1]) and split(name)[0] in TABLE


@contextmanager
def _silence() -> Iterator[None]:
    """Drop what Lightning says while it makes a Trainer."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
