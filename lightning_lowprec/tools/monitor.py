"""``lowprec monitor RUN``: draw the readings of a run as one HTML file, and print the layers that FP8 serves worst.

The page has a heat map, layers x samplings, of every number that a monitor has written. Every cell is one byte: 0 for
no number, 1 to 255 for the place between the two ends of its colours.
"""

import base64
import json
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Final

from lightning_lowprec.callbacks.readings import FILE, TENSORS, Limits, Reading, by_layer, read
from lightning_lowprec.tools.output import dumps, format_table, working

Samplings = Mapping[int, Sequence[Reading]]


@dataclass(frozen=True, kw_only=True)
class Worst:
    """What a run has seen of one layer at its last reading, and since when the layer is beyond a limit."""

    fqn: str
    output_db: float | None
    """Signal to noise of the output, dB."""
    underflow: Mapping[str, float]
    """By tensor, the share of values that become 0."""
    beyond: int
    """The number of last readings in a row that were beyond a limit."""
    reason: str | None


def run(args: Namespace) -> int:
    """Write the page and print the table, or with ``--keep`` the list alone."""
    limits = args.limits
    path = args.run / FILE if args.run.is_dir() else args.run
    if not path.is_file():
        raise ValueError(
            f"`run={str(args.run)!r}` has no {FILE}; expected the `folder` of a NumericsMonitor (in a Trainer its"
            " `default_root_dir` unless `folder=` was given)."
        )
    with working(f"reading {path}"):
        samplings = read(path)
        layers = worst(samplings, limits)
        if not args.keep:
            out = args.html or path.with_name("monitor.html")
            out.write_text(page(samplings, "/".join(path.resolve().parent.parts[-2:])))
    beyond = [layer for layer in layers if layer.beyond >= limits.patience]
    names = [layer.fqn for layer in beyond]
    if args.keep:
        lines = "".join(f'    "{layer.fqn}",  # {layer.reason}\n' for layer in beyond)
        print(dumps(names) if args.json else f"keep=[\n{lines}]" if beyond else "keep=[]")
        return 0
    if args.json:
        page_and_limits = {"page": str(out), "steps": list(samplings), "limits": asdict(limits)}
        print(dumps({**page_and_limits, "layers": list(map(asdict, layers)), "keep": names}))
        return 0
    print("\n".join(format_table([_HEADER, *map(_cells, layers[:SHOWN])], right=range(1, 6))))
    print(f"{len(layers)} layers, {len(samplings)} samplings, steps {min(samplings)} to {max(samplings)}.")
    print(f"{len(beyond)} layers are beyond a limit in their last {limits.patience} readings; `--keep` lists them.")
    print(f"wrote {out}")
    return 0


def worst(samplings: Samplings, limits: Limits) -> list[Worst]:
    """Return the layers of a run, those first that are beyond a limit for longest, then by signal to noise."""
    last: dict[str, list[Reading]] = {}
    beyond: dict[str, int] = {}
    for readings in samplings.values():
        for fqn, layer in by_layer(readings).items():
            last[fqn] = layer
            beyond[fqn] = 0 if limits.reason(layer) is None else beyond.get(fqn, 0) + 1
    rows = [
        Worst(
            fqn=fqn,
            output_db=layer[0].output_db,
            underflow={r.tensor: r.underflow for r in layer if r.underflow is not None},
            beyond=beyond[fqn],
            reason=limits.reason(layer),
        )
        for fqn, layer in last.items()
    ]
    return sorted(rows, key=lambda layer: (-layer.beyond, math.inf if layer.output_db is None else layer.output_db))


SHOWN: Final = 10
"""The number of layers in the table."""
_HEADER: Final = ("layer", "output dB", "input to 0", "weight to 0", "gradient to 0", "beyond", "reason")


def _cells(layer: Worst) -> tuple[str, ...]:
    shares = [layer.underflow.get(tensor) for tensor in ("input", "weight", "gradient")]
    return (
        layer.fqn,
        "-" if layer.output_db is None else f"{layer.output_db:.1f}",
        *("-" if share is None else f"{share:.2%}" for share in shares),
        str(layer.beyond),
        layer.reason or "-",
    )


# ---- the page

_LEVELS: Final = 254


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One kind of number, and how it is drawn."""

    name: str
    """The field of a reading."""
    logarithmic: bool = False
    """Whether powers of two are drawn at equal distances."""
    ends: tuple[float, float] | None = None
    """The numbers of the first and the last colour, the same for every run; None: the least and the largest seen."""
    low_is_bad: bool = False
    """Whether small numbers are drawn dark."""
    unit: str = ""


STATISTICS: Final = (
    Statistic(name="underflow", ends=(0.0, 1.0)),
    Statistic(name="amax", logarithmic=True),
    Statistic(name="scale", logarithmic=True),
)
OUTPUT: Final = Statistic(name="output_db", ends=(10.0, 30.0), low_is_bad=True, unit=" dB")


def page(samplings: Samplings, name: str) -> str:
    """Return the page of a run, with its name: readings by step."""
    layers = list(dict.fromkeys(reading.fqn for readings in samplings.values() for reading in readings))
    maps = [_map("output dB", OUTPUT, samplings, layers, None)]
    for statistic in STATISTICS:
        for tensor in TENSORS:
            maps.append(_map(f"{statistic.name} of {tensor}", statistic, samplings, layers, tensor))
    content = json.dumps({"run": name, "steps": list(samplings), "layers": layers, "maps": maps}, separators=(",", ":"))
    template = files("lightning_lowprec.tools").joinpath("monitor.html").read_text()
    return template.replace("__CONTENT__", content.replace("<", "\\u003c"))


def _map(
    title: str, statistic: Statistic, samplings: Samplings, layers: Sequence[str], tensor: str | None
) -> dict[str, object]:
    rows = {fqn: row for row, fqn in enumerate(layers)}
    numbers: list[float | None] = [None] * (len(layers) * len(samplings))
    for column, readings in enumerate(samplings.values()):
        for reading in readings:
            if tensor in (None, reading.tensor):
                number = getattr(reading, statistic.name)
                numbers[rows[reading.fqn] * len(samplings) + column] = _drawn(statistic, number)
    seen = [number for number in numbers if number is not None]
    least, most = statistic.ends or (min(seen, default=0.0), max(seen, default=0.0))
    span = most - least or 1.0
    levels = bytes(0 if n is None else 1 + round(_LEVELS * min(max((n - least) / span, 0), 1)) for n in numbers)
    return {
        "title": title,
        "least": least,
        "most": least + span,
        "log": statistic.logarithmic,
        "fixed": statistic.ends is not None,
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
