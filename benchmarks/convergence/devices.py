"""Importing this module makes names of the evidence known; only processes that train import it.

``fp8-hybrid@hopper`` is ``fp8-hybrid`` with ``emulate="hopper"``: fast accumulation in the forward, as on the GPU.
``fp8-hybrid@hopper-promoted`` is the same without fast accumulation: a new sum every 128 products in every product.
``nvfp4-torchao@no-finish`` and ``@half-finish`` are ``nvfp4-torchao`` with ``forward_finish=0.0`` and ``0.5``;
``nvfp4-torchao@mxfp8-backward`` has no finish, and ``gemms={"backward": "mxfp8"}``.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.convergence.precisions import FAST, HALF_FINISH, MX_BACKWARD, NO_FINISH, NVFP4, ON, PROMOTED
from lightning_lowprec.conversion import backends
from lightning_lowprec.names import TABLE

_ROW = replace(TABLE["fp8-hybrid"], fp16=False, masters=False, backend=None)
_NVFP4 = replace(TABLE[NVFP4], fp16=False, masters=False, backend=None)
_WHOLE = {**_NVFP4.options, "forward_finish": 0.0}
backends.register(
    backends.Backend(
        name="evidence",
        title="FP8 summed as on a GPU, NVFP4 without its finish",
        layers_from=(),  # the layers are torchao's
        names={
            FAST: replace(_ROW, options={"emulate": ON}),
            PROMOTED: replace(_ROW, options={"emulate": ON, "recipe": {"*": {"forward": "promoted"}}}),
            NO_FINISH: replace(_NVFP4, options=_WHOLE),
            HALF_FINISH: replace(_NVFP4, options={**_WHOLE, "forward_finish": 0.5}),
            MX_BACKWARD: replace(_NVFP4, options={**_WHOLE, "gemms": {"backward": "mxfp8"}}),
        },
    )
)
