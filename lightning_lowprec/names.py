"""The table of names: what a user may write after ``precision=`` beside Lightning's own names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_lowprec.msamp.plugin import MSAMP
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.half import HalfMixed
from lightning_lowprec.te import support
from lightning_lowprec.te.plugin import FP8TE
from lightning_lowprec.torchao.plugin import FP8TorchAO


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What one name stands for."""

    plugin: type[LowPrecision]
    options: Mapping[str, Any] = field(default_factory=dict)
    summary: str
    """One line for ``lowprec doctor`` and the docs."""
    prefers_te: Mapping[str, Any] | None = None
    """The options of FP8TE, which the name means where Transformer Engine runs; None: ``plugin`` everywhere."""


_TENSORWISE = "one scale per tensor, gradients in e5m2"
_E4M3 = "one scale per tensor, e4m3 everywhere"
_DELAYED = "scales from the amax of past steps"
_FP16 = "fp16 with loss scaling elsewhere"
_BF16 = "bf16 elsewhere"

TABLE: dict[str, Entry] = {
    "half-auto": Entry(
        plugin=HalfMixed,
        options={"dtype": "auto"},
        summary="bf16 autocast where the device has bf16, else fp16 with loss scaling",
    ),
    "bf16-master": Entry(
        plugin=HalfMixed,
        options={"dtype": "bf16", "master_weights": True},
        summary="bf16 weights and compute, float32 masters in the optimizer",
    ),
    "fp16-master": Entry(
        plugin=HalfMixed,
        options={"dtype": "fp16", "master_weights": True},
        summary="fp16 weights and compute, loss scaling, float32 masters in the optimizer",
    ),
    "bf16-remainder": Entry(
        plugin=HalfMixed,
        options={"dtype": "bf16", "master_weights": "remainder"},
        summary="bf16-master with the exact float32 masters kept in 2 more bytes instead of 4",
    ),
    "bf16-sr": Entry(
        plugin=HalfMixed,
        options={"dtype": "bf16", "master_weights": "stochastic"},
        summary="bf16 weights and compute, no masters: updates are rounded stochastically",
    ),
    # the names without a backend: see `create`
    "fp8-hybrid": Entry(
        plugin=FP8TorchAO,
        prefers_te={},
        summary=f"FP8 linear layers, {_TENSORWISE}, by Transformer Engine or else torchao; {_BF16}",
    ),
    "fp8-hybrid-fp16": Entry(
        plugin=FP8TorchAO,
        options={"base": "fp16"},
        prefers_te={"base": "fp16"},
        summary=f"FP8 linear layers, {_TENSORWISE}, by Transformer Engine or else torchao; {_FP16}",
    ),
    "fp8-e4m3": Entry(
        plugin=FP8TorchAO,
        options={"fp8_format": "e4m3"},
        prefers_te={"fp8_format": "e4m3"},
        summary=f"FP8 linear layers, {_E4M3}, by Transformer Engine or else torchao; {_BF16}",
    ),
    "fp8-e4m3-fp16": Entry(
        plugin=FP8TorchAO,
        options={"fp8_format": "e4m3", "base": "fp16"},
        prefers_te={"fp8_format": "e4m3", "base": "fp16"},
        summary=f"FP8 linear layers, {_E4M3}, by Transformer Engine or else torchao; {_FP16}",
    ),
    "fp8-tensorwise": Entry(plugin=FP8TorchAO, summary=f"torchao's tensorwise recipe: {_TENSORWISE}; {_BF16}"),
    "fp8-tensorwise-fp16": Entry(
        plugin=FP8TorchAO,
        options={"base": "fp16"},
        summary=f"torchao's tensorwise recipe: {_TENSORWISE}; {_FP16}",
    ),
    "fp8-hybrid-torchao": Entry(plugin=FP8TorchAO, summary="another name of fp8-tensorwise"),
    "fp8-hybrid-torchao-fp16": Entry(
        plugin=FP8TorchAO, options={"base": "fp16"}, summary="another name of fp8-tensorwise-fp16"
    ),
    "fp8-e4m3-torchao": Entry(plugin=FP8TorchAO, options={"fp8_format": "e4m3"}, summary=f"torchao, {_E4M3}; {_BF16}"),
    "fp8-e4m3-torchao-fp16": Entry(
        plugin=FP8TorchAO,
        options={"fp8_format": "e4m3", "base": "fp16"},
        summary=f"torchao, {_E4M3}; {_FP16}",
    ),
    "fp8-rowwise": Entry(
        plugin=FP8TorchAO,
        options={"recipe": "rowwise"},
        summary=f"torchao's rowwise recipe: one scale per row, e4m3 everywhere; {_BF16}",
    ),
    "fp8-rowwise-gw-hp": Entry(
        plugin=FP8TorchAO,
        options={"recipe": "rowwise_with_gw_hp"},
        summary=f"rowwise with the weight gradient in high precision, the most accurate; {_BF16}",
    ),
    "fp8-hybrid-te": Entry(plugin=FP8TE, summary=f"Transformer Engine, {_DELAYED}, gradients in e5m2; {_BF16}"),
    "fp8-hybrid-te-fp16": Entry(
        plugin=FP8TE,
        options={"base": "fp16"},
        summary=f"Transformer Engine, {_DELAYED}, gradients in e5m2; {_FP16}",
    ),
    "fp8-e4m3-te": Entry(
        plugin=FP8TE,
        options={"fp8_format": "e4m3"},
        summary=f"Transformer Engine, {_DELAYED}, e4m3 everywhere; {_BF16}",
    ),
    "fp8-e4m3-te-fp16": Entry(
        plugin=FP8TE,
        options={"fp8_format": "e4m3", "base": "fp16"},
        summary=f"Transformer Engine, {_DELAYED}, e4m3 everywhere; {_FP16}",
    ),
    "fp8-current": Entry(
        plugin=FP8TE,
        options={"recipe": "current"},
        summary=f"Transformer Engine, scales from each tensor, gradients in e5m2; {_BF16}",
    ),
    "fp8-current-fp16": Entry(
        plugin=FP8TE,
        options={"recipe": "current", "base": "fp16"},
        summary=f"Transformer Engine, scales from each tensor, gradients in e5m2; {_FP16}",
    ),
    "fp8-block": Entry(
        plugin=FP8TE,
        options={"recipe": "block"},
        summary=f"Transformer Engine, a scale per 128 values or 128x128 weights, e4m3; {_BF16}",
    ),
    "mxfp8": Entry(
        plugin=FP8TE,
        options={"recipe": "mxfp8"},
        summary=f"Transformer Engine, a power-of-two scale per 32 values, e4m3 (Blackwell); {_BF16}",
    ),
    "nvfp4": Entry(
        plugin=FP8TE,
        options={"recipe": "nvfp4"},
        summary=f"Transformer Engine, 4 bits with a scale per 16 values (Blackwell); {_BF16}",
    ),
    "msamp-o1": Entry(
        plugin=MSAMP,
        options={"level": "O1"},
        summary=f"FP8 linear layers with fp16 weights and FP8 gradients, float32 moments; {_BF16}",
    ),
    "msamp-o2": Entry(
        plugin=MSAMP,
        options={"level": "O2"},
        summary=f"FP8 linear layers with fp16 weights, FP8 gradients, e4m3 and fp16 moments; {_BF16}",
    ),
    "msamp-o3": Entry(
        plugin=MSAMP,
        options={"level": "O3"},
        summary=f"FP8 linear layers with e4m3 weights and fp16 masters, the rest as msamp-o2; {_BF16}",
    ),
}


def create(name: str, *, sharded: bool = False) -> LowPrecision:
    """A new plugin for a name of the table.

    A name without a backend means Transformer Engine where that is installed and every GPU has FP8; under FSDP2 it
    means torchao, which goes with compilation and tensor parallelism there. One that is installed but does not import
    raises.

    Args:
        name: one of ``TABLE``.
        sharded: whether it will run under FSDP2.

    Raises:
        ImportError: what it needs is not installed, or does not import.
    """
    entry = TABLE[name]
    if entry.prefers_te is not None and not sharded and support.runs_here():
        plugin: LowPrecision = FP8TE(**entry.prefers_te)
    else:
        plugin = entry.plugin(**entry.options)
    plugin.precision = name
    if isinstance(plugin, (FP8TE, FP8TorchAO)):
        plugin.backend_is_chosen = entry.prefers_te is not None
    return plugin


def unknown_name(name: object, also_allowed: Sequence[object] = ()) -> ValueError:
    """The error for a name that nobody knows: every allowed name (Lightning's first), and the nearest one."""
    allowed = [*also_allowed, *TABLE]
    message = f"Precision {name!r} is invalid. Allowed precision values: {', '.join(map(repr, allowed))}."
    near = difflib.get_close_matches(str(name).lower(), [str(value) for value in allowed], n=1, cutoff=0.5)
    return ValueError(message + (f" Did you mean {near[0]!r}?" if near else ""))
