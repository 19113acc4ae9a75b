"""Importing this module makes names of the evidence known; only processes that train import it.

``fp8-hybrid@hopper`` is ``fp8-hybrid`` with ``emulate="hopper"``: fast accumulation in the forward, as on the GPU.
``fp8-hybrid@hopper-promoted`` is the same without fast accumulation: a new sum every 128 products in every product.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.evidence.names import FAST, PROMOTED
from lightning_lowprec.conversion import backends
from lightning_lowprec.names import TABLE

_ROW = replace(TABLE["fp8-hybrid"], fp16=False, masters=False, backend=None)
backends.register(
    backends.Backend(
        name="evidence",
        title="FP8 summed as on a GPU",
        layers_from=(),  # the layers are torchao's
        names={
            FAST: replace(_ROW, options={"emulate": "hopper"}),
            PROMOTED: replace(_ROW, options={"emulate": "hopper", "fast_accum": "none"}),
        },
    )
)
