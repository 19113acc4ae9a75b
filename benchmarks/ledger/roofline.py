"""Predict the time of a step from an entry of the ledger: FLOPs and bytes over named rates. A model, not a measurement.

A matrix product takes FLOPs / rate of its format; attention likewise; everything else bytes / bandwidth; each kernel
adds a gap. Tails, clocks and the host are left out: published steps took 1.1 to 4 times as long, and their ratios are
nearer (``benchmarks/ledger/score.py``, docs/speed.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.ledger.entry import Amount, Entry

H200: Mapping[str, Mapping[str, float]] = {
    "middle": {
        "bfloat16": 690e12,
        "float16": 690e12,
        "float8 fast": 1250e12,
        "float8 exact": 1130e12,
        "int8": 1000e12,
    },
    "optimistic": {
        "bfloat16": 740e12,
        "float16": 740e12,
        "float8 fast": 1350e12,
        "float8 exact": 1300e12,
        "int8": 1250e12,
    },
    "pessimistic": {
        "bfloat16": 650e12,
        "float16": 650e12,
        "float8 fast": 1100e12,
        "float8 exact": 950e12,
        "int8": 750e12,
    },
}
"""FLOP/s that an H200 is assumed to sustain under its power limit, by format; nobody has measured these here."""
COMMON: Mapping[str, float] = {
    "float32": 50e12,
    "attention forward": 570e12,
    "attention backward": 460e12,
    "bandwidth": 4.1e12,
    "gap": 1.0e-6,
}
"""FLOP/s of float32 without TF32 and of cuDNN's attention; bytes/s; seconds between two kernels."""


@dataclass(frozen=True)
class Rates:
    """What a device sustains."""

    label: str
    """Who says so: "assumed, middle", or the file of measured rates."""
    values: Mapping[str, float]
    """FLOP/s by format, "attention forward" and "backward", "bandwidth" in bytes/s, "gap" in seconds per kernel."""

    def of_product(self, which: str) -> float:
        """Return the rate of a product's format: its own, else that of the same accumulation with one scale."""
        plain = f"float8 {which.rpartition(' ')[2]}"
        rate = self.values.get(which) or (self.values.get(plain) if which.startswith("float8") else None)
        if rate is None:
            raise KeyError(f"no rate for products of format {which!r}; known: {', '.join(sorted(self.values))}")
        return rate


def assumed(which: str = "middle") -> Rates:
    """Return the assumed rates of an H200: "middle", "optimistic" or "pessimistic"."""
    return Rates(f"assumed for an H200, {which}", {**COMMON, **H200[which]})


def from_file(path: Path) -> Rates:
    """Return the middle rates with those replaced that a file holds.

    The file names rates as here: ``{"bandwidth": 4.0e12, ...}``.
    """
    found = json.loads(path.read_text())
    known = sorted(assumed().values)
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ValueError(f"{path}: unknown rates {unknown}; expected some of: {', '.join(known)}")
    return Rates(f"{path.name} (the others assumed)", {**assumed().values, **found})


@dataclass
class Prediction:
    """Predicted milliseconds of a step, by what takes them."""

    milliseconds: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The step."""
        return sum(self.milliseconds.values())

    def of(self, kind: str) -> float:
        """Return the part that is called so, or begins so: "products", "attention", "bytes" ..."""
        return sum(ms for name, ms in self.milliseconds.items() if name.startswith(kind))


def predict(entry: Entry, rates: Rates) -> Prediction:
    """Return the predicted time of one step."""
    found: dict[str, float] = {}

    def add(what: str, seconds: float) -> None:
        found[what] = found.get(what, 0.0) + 1e3 * seconds

    for phase in entry.stretches:
        amount = entry.phase(phase)
        for which, flops in amount.product_flops.items():
            add(f"products {which}", flops / rates.of_product(which))
        direction = "backward" if phase == "backward" else "forward"
        add("attention", amount.attention_flops / rates.values[f"attention {direction}"])
        add("optimizer" if phase == "optimizer" else f"bytes, {phase}", amount.bytes / rates.values["bandwidth"])
        add("gaps", launched(amount) * rates.values["gap"])
    return Prediction(found)


def launched(amount: Amount) -> int:
    """Return how often something is launched."""
    return amount.kernels + amount.products + amount.copies
