"""The readings of a monitor, the limits for them, and the file that holds them: one line of JSON per sampling.

    {"step": 200, "layers": {"blocks.0.up": {"input": [amax, underflow, scale],
                                             "weight": [...], "gradient": [...],
                                             "output_db": 31.2}, ...}}

A run that is resumed appends to its file. A line of a step makes earlier lines of this step and of later ones void:
these lines are of a run that ended, and whose checkpoint was older.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final, get_args

from lightning_lowprec.checks import Count
from lightning_lowprec.conversion.options import shows

Tensor3 = Literal["input", "weight", "gradient"]
TENSORS: Final[tuple[Tensor3, ...]] = get_args(Tensor3)
FILE: Final = "numerics.jsonl"
"""The name of the file within the folder of a run."""
NUMBERS: Final = ("amax", "underflow", "scale")
_DIGITS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one sampling saw of one tensor of one layer; the same numbers on all ranks."""

    step: int
    """Optimizer steps that were made before."""
    fqn: str
    """The layer."""
    tensor: Tensor3
    """``"gradient"`` is that of the layer's output."""
    amax: float
    """The largest absolute value, over all rows and ranks; NaN if a value is not finite."""
    underflow: float | None
    """The share of sampled values other than 0 that become 0; None: not known."""
    scale: float | None
    """The number by which values are multiplied, of several the smallest; None: not known, or not one number."""
    output_db: float | None
    """Signal to noise of the layer's output against the same product in high precision, dB; None: not known."""


@final
@shows()
@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits beyond which a layer is better kept in high precision.

    Args:
        underflow: a reading is bad if a larger share of the values of one tensor becomes 0.
        output_db: a reading is bad if the signal to noise of the output is smaller, dB.
        patience: a layer is listed after so many bad readings in a row.
    """

    underflow: float = 0.3
    output_db: float = 20.0
    patience: Count = 3

    def reason(self, layer: Sequence[Reading]) -> str | None:
        """Return why one reading of a layer (of up to three tensors) is beyond a limit, or None."""
        for reading in layer:
            if math.isnan(reading.amax):
                return f"{reading.tensor} is not finite"
            if reading.underflow is not None and reading.underflow > self.underflow:
                return f"{reading.underflow:.0%} of {reading.tensor} become 0"
        output_db = layer[0].output_db
        return None if output_db is None or output_db >= self.output_db else f"output has {output_db:.1f} dB"


def append(path: Path, step: int, readings: Iterable[Reading]) -> None:
    """Append the line of one sampling; the folder is made if there is none."""
    layers: dict[str, dict[str, object]] = {}
    for reading in readings:
        layer = layers.setdefault(reading.fqn, {})
        layer[reading.tensor] = [_short(getattr(reading, name)) for name in NUMBERS]
        layer["output_db"] = _short(reading.output_db)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":  # the run that wrote before was killed within a line
                file.write(b"\n")
        file.write((json.dumps({"step": step, "layers": layers}, separators=(",", ":")) + "\n").encode())


def read(path: Path) -> dict[int, list[Reading]]:
    """Return the readings of a file by step, in their order; a last line that was not written whole is left out."""
    samplings: dict[int, list[Reading]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            content = json.loads(line)
            step, layers = content["step"], content["layers"]
            readings = [reading for fqn, layer in layers.items() for reading in _readings(step, fqn, layer)]
        except json.JSONDecodeError:
            continue  # cut off when a run was killed
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number} of {str(path)!r} is not a sampling of a NumericsMonitor.") from error
        samplings = {earlier: kept for earlier, kept in samplings.items() if earlier < step}
        samplings[step] = readings
    if not samplings:
        raise ValueError(f"{str(path)!r} holds no sampling of a NumericsMonitor.")
    return samplings


def by_layer(readings: Iterable[Reading]) -> dict[str, list[Reading]]:
    """Return the readings of one sampling by fqn, in order."""
    layers: dict[str, list[Reading]] = {}
    for reading in readings:
        layers.setdefault(reading.fqn, []).append(reading)
    return layers


def _readings(step: int, fqn: str, layer: dict[str, Any]) -> list[Reading]:
    readings = []
    for tensor in TENSORS:
        if tensor in layer:
            amax, underflow, *_, scale = layer[tensor]  # earlier versions had one more number
            numbers = {"amax": math.nan if amax is None else amax, "underflow": underflow, "scale": scale}
            readings.append(Reading(step=step, fqn=fqn, tensor=tensor, output_db=layer["output_db"], **numbers))
    return readings


def _short(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else float(f"{number:.{_DIGITS}g}")
