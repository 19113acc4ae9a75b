"""Who is compared: what a user would pick instead, and every name of ours; in order of value.

A name enters by itself as soon as the table of names has it. Names of the design that it does not have yet are listed
as missing: nothing is pretended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_lane import setups
from benchmarks.gpu_lane.item import missing_library
from benchmarks.gpu_lane.running import Job, Running
from lightning_lowprec.precisions import TABLE

BASELINE = "lightning bf16-mixed, compiled"
LIGHTNING_BF16 = (BASELINE, "lightning bf16-true, compiled", "lightning bf16-mixed", "lightning bf16-true",
                  "lightning bf16-mixed, whole model compiled")  # fmt: skip
MAIN = "ours fp8-tensorwise"
SHARDED = f"{MAIN}, fsdp2"
TE = "transformer_engine.pytorch"
TO_COME = (
    "fp16-master", "bf16-master", "bf16-remainder", "bf16-sr", "fp8-hybrid-te", "fp8-e4m3-te", "fp8-current",
    "fp8-block", "mxfp8", "nvfp4", "msamp-o1", "msamp-o2", "msamp-o3",
)  # fmt: skip
"""Names of the design, to be reported as missing while the table has no entry."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train the same model on the same data."""

    key: str
    setup: Callable[[Job], Running]
    needs: tuple[str, ...] = ()
    cuda_only: bool = False
    linear: str | None = None
    """Which column of the linear table its FP8 layers are."""
    absent: str | None = None
    """Why there is nothing to run at all."""

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run on ``device``, or None."""
        if self.absent is not None:
            return self.absent
        reason = missing_library(self.needs)
        if reason is None and self.cuda_only and device.type != "cuda":
            return "needs a CUDA GPU"
        return reason


def contenders() -> list[Contender]:
    """Everyone, the most valuable first."""
    known = {contender.key: contender for contender in (*_rivals(), *_ours())}
    ranked = [key for key in ORDER if key in known]
    return [known[key] for key in (*ranked, *(key for key in known if key not in ORDER))]


def find(key: str) -> Contender:
    """The contender of this key."""
    return next(contender for contender in contenders() if contender.key == key)


ORDER = (
    BASELINE, MAIN, "torchao tensorwise, compiled", "te delayed", "lightning bf16-true, compiled",
    "accelerate torchao, compiled", "lightning transformer-engine", "accelerate te", "ours fp8-rowwise",
    "ours fp8-tensorwise, min_gain=auto", "lightning bf16-mixed", "ours fp8-rowwise-gw-hp", "te current", "te block",
    "lightning bf16-true", "torchao rowwise, compiled", "ours half-auto",
)  # fmt: skip


def _rivals() -> list[Contender]:
    found = [
        Contender(
            key=f"lightning {precision}{', compiled' if compiled else ''}",
            setup=partial(setups.lightning, precision=precision, compiled=compiled),
            needs=("lightning",),
        )
        for precision in ("bf16-mixed", "bf16-true")
        for compiled in (True, False)
    ]
    found.append(
        Contender(
            key="lightning transformer-engine",
            setup=partial(setups.lightning, precision="transformer-engine", compiled=False),
            needs=("lightning", TE),
            cuda_only=True,
            linear="te delayed",
        )
    )
    whole = partial(setups.whole_model, precision="bf16-mixed")
    found.append(Contender(key=LIGHTNING_BF16[-1], setup=whole, needs=("lightning",)))
    return [*found, *_beside_lightning()]


def _beside_lightning() -> list[Contender]:
    found = [
        Contender(
            key="accelerate te",
            setup=partial(setups.accelerate, backend="te"),
            needs=("accelerate", TE),
            cuda_only=True,
            linear="te delayed",
        ),
        Contender(
            key="accelerate torchao, compiled",
            setup=partial(setups.accelerate, backend="torchao"),
            needs=("accelerate", "torchao.float8"),
            linear="torchao tensorwise",
        ),
    ]
    found += [
        Contender(
            key=f"torchao {recipe}, compiled",
            setup=partial(setups.torchao, recipe=recipe),
            needs=("torchao.float8",),
            linear=f"torchao {recipe}",
        )
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    ]
    found += [
        Contender(
            key=f"te {recipe}", setup=partial(setups.transformer_engine, recipe=recipe), needs=(TE,), cuda_only=True,
            linear=f"te {recipe}",
        )
        for recipe in ("delayed", "current", "block")
    ]  # fmt: skip
    return found


def _ours() -> list[Contender]:
    found: dict[str, Contender] = {}
    for name, entry in TABLE.items():
        if entry.prefers_te is not None:  # means what one of the names with a backend means
            continue
        identity = f"{entry.plugin.__name__} {sorted(entry.options.items())}"
        found.setdefault(
            identity,
            Contender(
                key=f"ours {name}", setup=partial(setups.ours, name=name), needs=_needs(entry.plugin.__name__),
                linear=_linear(entry.plugin.__name__, entry.options),
            ),
        )  # fmt: skip
    by_gain = Contender(
        key="ours fp8-tensorwise, min_gain=auto",
        setup=partial(setups.ours, name="fp8-tensorwise", options={"min_gain": "auto"}),
        needs=("torchao.float8",),
    )
    absent = [
        Contender(key=f"ours {name}", setup=_nothing, absent=f"{name!r} is not in the table of names yet")
        for name in TO_COME
        if name not in TABLE
    ]
    return [*found.values(), by_gain, _sharded(), *absent]


def _sharded() -> Contender:
    """FP8 under FSDP2 with one process: all of its work but what goes over the wire."""
    return Contender(
        key=SHARDED,
        setup=partial(setups.ours, name=MAIN.removeprefix("ours "), strategy="fsdp2"),
        needs=("torchao.float8",),
        linear="torchao tensorwise",
    )


def _needs(plugin: str) -> tuple[str, ...]:
    return {"FP8TorchAO": ("torchao.float8",), "FP8TE": (TE,)}.get(plugin, ())


def _linear(plugin: str, options: Any) -> str | None:
    backend = {"FP8TorchAO": "torchao", "FP8TE": "te"}.get(plugin)
    if backend is None:
        return None
    return f"{backend} {options.get('recipe', 'tensorwise' if backend == 'torchao' else 'delayed')}"


def _nothing(job: Job) -> Running:
    raise RuntimeError("there is nothing to set up")
