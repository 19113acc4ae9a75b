"""One HTML page with a heat map, layers x samplings, of every number that a monitor has written.

The page loads nothing. Every cell is one byte: 0 for no number, 1 to 255 for the place between the least and the
largest number of its map, so that 200 layers x 500 samplings x 13 maps take 1.8 MB.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, final

from lightning_lowprec.callbacks.readings import TENSORS, Reading

_LEVELS: Final = 254


@final
@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One kind of number, and how it is drawn."""

    name: str
    """As in the page."""
    of: Callable[[Reading], float | None]
    """Returns the number of a reading."""
    logarithmic: bool = False
    """Whether powers of two are drawn at equal distances."""
    least: float | None = None
    """The number of the lightest colour; None: the least that was seen."""
    most: float | None = None
    """The number of the darkest colour; None: the largest that was seen."""
    low_is_bad: bool = False
    """Whether small numbers are drawn dark."""
    unit: str = ""
    """Behind the number."""


STATISTICS: Final = (
    Statistic(name="underflow", of=lambda r: r.underflow, least=0.0, most=1.0),
    Statistic(name="saturated", of=lambda r: r.saturated, least=0.0),
    Statistic(name="amax", of=lambda r: r.amax, logarithmic=True),
    Statistic(name="scale", of=lambda r: r.scale, logarithmic=True),
)
OUTPUT: Final = Statistic(name="output dB", of=lambda r: r.output_db, low_is_bad=True, unit=" dB")


def page(samplings: Mapping[int, Sequence[Reading]]) -> str:
    """Return the page of a run: readings by step."""
    layers = list(dict.fromkeys(reading.fqn for readings in samplings.values() for reading in readings))
    maps = [_map("output dB", OUTPUT, samplings, layers, None)]
    for statistic in STATISTICS:
        for tensor in TENSORS:
            maps.append(_map(f"{statistic.name} of {tensor}", statistic, samplings, layers, tensor))
    content = json.dumps({"steps": list(samplings), "layers": layers, "maps": maps}, separators=(",", ":"))
    template = files("lightning_lowprec.tools.monitor").joinpath("page.html").read_text()
    return template.replace("__CONTENT__", content.replace("<", "\\u003c"))


def _map(
    title: str,
    statistic: Statistic,
    samplings: Mapping[int, Sequence[Reading]],
    layers: Sequence[str],
    tensor: str | None,
) -> dict[str, Any]:
    rows = {fqn: row for row, fqn in enumerate(layers)}
    numbers: list[float | None] = [None] * (len(layers) * len(samplings))
    for column, readings in enumerate(samplings.values()):
        for reading in readings:
            if tensor in (None, reading.tensor):
                numbers[rows[reading.fqn] * len(samplings) + column] = _drawn(statistic, statistic.of(reading))
    seen = [number for number in numbers if number is not None]
    least = min(seen, default=0.0) if statistic.least is None else statistic.least
    most = max(seen, default=0.0) if statistic.most is None else statistic.most
    span = most - least or 1.0
    levels = bytes(0 if n is None else 1 + round(_LEVELS * min(max((n - least) / span, 0), 1)) for n in numbers)
    return {
        "title": title,
        "least": least,
        "most": least + span,
        "log": statistic.logarithmic,
        "lowIsBad": statistic.low_is_bad,
        "unit": statistic.unit,
        "cells": base64.b64encode(levels).decode(),
    }


def _drawn(statistic: Statistic, number: float | None) -> float | None:
    if number is None or not math.isfinite(number):
        return None
    if not statistic.logarithmic:
        return number
    return math.log2(number) if number > 0 else None
