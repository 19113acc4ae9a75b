"""The time of a step that the ledger predicts: committed counts, over the rates of this device where they are known."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.gpu_lane.machine import ROOT
from benchmarks.gpu_lane.rates import rates_of

COUNTED = ROOT / "benchmarks/results/null-gpu-2026-11-23/ledger-124m.json"
"""Made by ``python -m benchmarks.ledger --shape 124m --batch 32``, with the contenders of ``convergence``."""


def predicted_ms(data: dict[str, Any], model: str, batch: int) -> tuple[dict[str, float], str]:
    """Return the predicted milliseconds of a step by contender, and whose rates these are.

    Nothing is predicted for another model or batch than the counted one, and for a contender whose products are not
    all counted: those of ``int8-mixed`` are Triton kernels, whose FLOPs the ledger does not know.
    """
    from benchmarks.ledger import roofline
    from benchmarks.ledger.entry import Entry

    measured = roofline.of_the_lane(rates_of(data))
    rates = roofline.Rates("", {**roofline.assumed().values, **measured})
    entries = [Entry.from_json({**found, "kernels": []}) for found in json.loads(COUNTED.read_text())["entries"]]
    counted = [entry for entry in entries if (entry.shape["name"], entry.batch) == (model, batch)]
    flops = {entry.contender: sum(entry.whole().product_flops.values()) for entry in counted}
    most = max(flops.values(), default=0)
    found = {e.contender: roofline.predict(e, rates).total for e in counted if flops[e.contender] == most}
    return found, "of this run (what it has not is assumed)" if measured else roofline.assumed().label
