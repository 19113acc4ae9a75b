"""The table of names: what a user may write after ``precision=`` beside Lightning's own names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_lowprec.plugins import MSAMP, FP8TorchAO, HalfMixed, LowPrecision


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What one name stands for."""

    plugin: type[LowPrecision]
    options: Mapping[str, Any] = field(default_factory=dict)
    summary: str
    """One line for ``lowprec doctor`` and the docs."""


_TENSORWISE = "one scale per tensor, gradients in e5m2"
_E4M3 = "one scale per tensor, e4m3 everywhere"
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
    # Transformer Engine is not supported yet, so the two names without a backend mean torchao's
    "fp8-hybrid": Entry(plugin=FP8TorchAO, summary=f"FP8 linear layers, {_TENSORWISE}; {_BF16}"),
    "fp8-hybrid-fp16": Entry(
        plugin=FP8TorchAO, options={"base": "fp16"}, summary=f"FP8 linear layers, {_TENSORWISE}; {_FP16}"
    ),
    "fp8-e4m3": Entry(
        plugin=FP8TorchAO, options={"fp8_format": "e4m3"}, summary=f"FP8 linear layers, {_E4M3}; {_BF16}"
    ),
    "fp8-e4m3-fp16": Entry(
        plugin=FP8TorchAO,
        options={"fp8_format": "e4m3", "base": "fp16"},
        summary=f"FP8 linear layers, {_E4M3}; {_FP16}",
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


def create(name: str) -> LowPrecision:
    """A new plugin for a name of the table."""
    entry = TABLE[name]
    plugin = entry.plugin(**entry.options)
    plugin.precision = name
    return plugin


def unknown_name(name: object, also_allowed: Sequence[object] = ()) -> ValueError:
    """The error for a name that nobody knows: every allowed name (Lightning's first), and the nearest one."""
    allowed = [*also_allowed, *TABLE]
    message = f"Precision {name!r} is invalid. Allowed precision values: {', '.join(map(repr, allowed))}."
    near = difflib.get_close_matches(str(name).lower(), [str(value) for value in allowed], n=1, cutoff=0.5)
    return ValueError(message + (f" Did you mean {near[0]!r}?" if near else ""))
