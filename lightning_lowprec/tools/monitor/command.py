"""``lowprec monitor RUN``: draw the readings of a run as one HTML file, and print the layers that FP8 serves worst."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from lightning_lowprec.callbacks.readings import FILE, Demotion, Reading, by_layer, read
from lightning_lowprec.tools import strict_json
from lightning_lowprec.tools.monitor.page import page
from lightning_lowprec.tools.table import format_table
from lightning_lowprec.tools.terminal import working

Samplings = Mapping[int, Sequence[Reading]]
_NOTHING_BEYOND: Final = "keep=[]"


@final
@dataclass(frozen=True, kw_only=True)
class Worst:
    """What a run has seen of one layer at its last reading, and since when the layer is beyond a limit."""

    fqn: str
    """The layer."""
    output_db: float | None
    """Signal to noise of the output, dB."""
    underflow: Mapping[str, float]
    """By tensor, the share of values that become 0."""
    beyond: int
    """The number of last readings in a row that were beyond a limit."""
    reason: str | None
    """Why the last reading is beyond a limit, or None."""


def run(args: Any) -> int:
    """Write the page and print the table, or with ``--keep`` the list alone."""
    limits = Demotion(underflow=args.underflow, output_db=args.output_db, patience=args.patience)
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
            out.write_text(page(samplings))
    if args.keep:
        print(strict_json.dumps(_kept(layers, limits)) if args.json else keep(layers, limits))
        return 0
    if args.json:
        print(strict_json.dumps(_as_json(samplings, layers, limits, out)))
        return 0
    print("\n".join(format_table([_HEADER, *map(_cells, layers[: args.top])], right=range(1, 6))))
    beyond = [layer for layer in layers if layer.beyond >= limits.patience]
    print(f"{len(layers)} layers, {len(samplings)} samplings, steps {min(samplings)} to {max(samplings)}.")
    print(f"{len(beyond)} layers are beyond a limit in their last {limits.patience} readings; `--keep` lists them.")
    print(f"wrote {out}")
    return 0


def worst(samplings: Samplings, limits: Demotion) -> list[Worst]:
    """Return the layers of a run, those first that are beyond a limit for longest, then by signal to noise."""
    last: dict[str, list[Reading]] = {}
    beyond: dict[str, int] = {}
    for readings in samplings.values():
        for fqn, layer in by_layer(readings).items():
            last[fqn] = layer
            beyond[fqn] = 0 if limits.reason(layer) is None else beyond.get(fqn, 0) + 1
    found = [
        Worst(
            fqn=fqn,
            output_db=layer[0].output_db,
            underflow={r.tensor: r.underflow for r in layer if r.underflow is not None},
            beyond=beyond[fqn],
            reason=limits.reason(layer),
        )
        for fqn, layer in last.items()
    ]
    return sorted(found, key=lambda layer: (-layer.beyond, math.inf if layer.output_db is None else layer.output_db))


def keep(layers: Sequence[Worst], limits: Demotion) -> str:
    """Return the argument of a plugin that keeps the layers beyond a limit in high precision, with a reason each."""
    bad = [layer for layer in layers if layer.beyond >= limits.patience]
    if not bad:
        return _NOTHING_BEYOND
    return "keep=[\n" + "".join(f'    "{layer.fqn}",  # {layer.reason}\n' for layer in bad) + "]"


def _kept(layers: Sequence[Worst], limits: Demotion) -> list[str]:
    return [layer.fqn for layer in layers if layer.beyond >= limits.patience]


def _as_json(samplings: Samplings, layers: Sequence[Worst], limits: Demotion, out: Path) -> dict[str, Any]:
    return {
        "page": str(out),
        "steps": list(samplings),
        "limits": asdict(limits),
        "layers": [asdict(layer) for layer in layers],
        "keep": _kept(layers, limits),
    }


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
