"""Measure the error of an approximation, and hold it against a committed sample of the same measurement."""

import functools
import json
import os
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

SAMPLE = Path(__file__).with_name("noise.json")
"""By test and number of the call, the mean and the standard deviation over seeds, dB; written by `tests/noise.py`."""
WRITTEN_TO = "NOISE_FILE"
"""The variable of the environment that names the file for measurements, while a sample is taken."""
DEVIATIONS = 7
FLOAT32 = 120.0
"""dB: what is nearer than this is equal but for the order of float32 sums."""
_calls: dict[str, "count[int]"] = {}


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Return signal to quantisation noise in dB: ``10 log10(sum reference**2 / sum (reference - approximation)**2)``.

    Equal tensors give inf. Sums are in float64.
    """
    signal = reference.detach().double()
    noise = (signal - approximation.detach().double()).square().sum()
    return float(10 * torch.log10(signal.square().sum() / noise)) if noise else float("inf")


def expect_db(decibels: float, least: float, what: str = "") -> None:
    """Assert that a signal to noise is at least ``least``, and at most seven deviations below the committed mean.

    A new call, or a test with another name, needs a sample: `python -m tests.noise tests/the_file.py`.
    """
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    if test not in _calls:
        _calls.clear()  # of the test before
        _calls[test] = count()
    key = f"{test} #{next(_calls[test])}"
    decibels = min(decibels, 300.0)  # equal tensors
    if WRITTEN_TO in os.environ:
        with Path(os.environ[WRITTEN_TO]).open("a") as file:
            file.write(json.dumps([key, decibels]) + "\n")
        return
    mean, deviation = _sample()[key]
    least = max(least, min(mean - DEVIATIONS * deviation, FLOAT32))
    assert decibels >= least, f"{what} {decibels:.1f} dB; expected {least:.1f}, of {mean:.1f} +- {deviation:.1f}"


@functools.cache
def _sample() -> dict[str, list[float]]:
    content: dict[str, list[float]] = json.loads(SAMPLE.read_text())
    return content
