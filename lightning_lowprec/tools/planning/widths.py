"""How wide the numbers are that a precision computes with, keeps and sends: read from a layer that it trains.

One Linear is trained for a step by AdamW under each precision, in Fabric on the CPU. Its GEMMs are watched as they run
(an emulated one multiplies decoded FP8 in float32: what counts is the format its operands were decoded from); weight,
gradient, master and moments are looked at afterwards. What is sent is what DDP and FSDP2 would get.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowprec import names as precisions
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.fsdp2.resolve import half_under_fsdp2
from lightning_lowprec.fsdp2.strategy import gathers_fp8, param_dtype
from lightning_lowprec.masters.optimizer import kept_masters
from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.weight import msamp_state_of
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.tools.availability import availability

LIGHTNINGS: Final = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")
_TOKENS, _IN, _OUT = 16, 32, 48  # all different, so that a product's shape says which of the three it is
_PRODUCTS: Final = {
    "output": {(_TOKENS, _OUT), (_OUT, _TOKENS)},
    "grad_input": {(_TOKENS, _IN), (_IN, _TOKENS)},
    "grad_weight": {(_OUT, _IN), (_IN, _OUT)},
}
_aten: Any = torch.ops.aten
_MATMULS: Final = {_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default}
_SAME_NUMBERS: Final = {
    _aten._to_copy.default, _aten.t.default, _aten.transpose.int, _aten.view.default, _aten._unsafe_view.default,
    _aten.detach.default, _aten.clone.default, _aten.slice.Tensor,
}  # fmt: skip
_SHORT: Final = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2", torch.int16: "int16",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Widths:
    """One precision; dtypes as ``fp32``, ``bf16``, ``fp16``, ``e4m3``, ``e5m2``, ``int16``; ``-``: there is none."""

    precision: str
    output: str = "-"
    """The operands of ``input @ weight.T``."""
    grad_input: str = "-"
    """Of ``grad_output @ weight``."""
    grad_weight: str = "-"
    """Of ``grad_output.T @ input``."""
    weight: str = "-"
    gradient: str = "-"
    """At ``weight.grad``."""
    master: str = "-"
    moments: str = "-"
    """AdamW's first and second."""
    ddp: str = "-"
    """What is sent of a gradient."""
    fsdp2: str = "-"
    """What is sent of a weight when it is gathered; gradients are reduced in float32."""
    reason: str = ""
    """Why it does not run here; empty if it does."""


def all_names() -> list[str]:
    """Lightning's names, then ours."""
    return [*LIGHTNINGS, *precisions.TABLE]


def survey() -> list[Widths]:
    """Every precision, trained one after the other: a few seconds."""
    return [widths(name) for name in all_names()]


def widths(name: str) -> Widths:
    """One precision, by really training a layer under it on the CPU."""
    if name in precisions.TABLE:
        verdict = availability(name, torch.device("cpu"))
        if not verdict.runs:
            return Widths(precision=name, reason=verdict.reason)
    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _trained(name)


def _trained(name: str) -> Widths:
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)  # type: ignore[arg-type]  # also names of ours
    plugin = fabric.strategy.precision
    if plugin.precision != name:
        return Widths(precision=name, reason=f"Lightning takes {plugin.precision!r} instead on the CPU")
    module = _Layer()
    wrapped, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    with _Products() as products:
        fabric.backward(wrapped(torch.randn(_TOKENS, _IN, requires_grad=True)).float().square().mean())
    weight = module.body.weight
    gradient = _dtype(weight.grad)
    optimizer.step()
    raw = optimizer.optimizer
    entry = next(e for e in raw.state.values() if e["exp_avg"].shape == weight.shape)
    scaled = msamp_state_of(weight)
    masters = kept_masters(raw) if scaled is None else [scaled.master]
    return Widths(
        precision=name,
        **products.seen,
        weight=_dtype(weight),
        gradient=gradient,
        master=next((_dtype(master) for master in masters), "-"),
        moments=_pair(_dtype(entry["exp_avg"]), _dtype(entry["exp_avg_sq"])),
        ddp=_reduced(plugin, gradient),
        fsdp2=_gathered(name, plugin, weight),
    )


class _Layer(nn.Module):
    """One Linear in front of a norm, so that it is no output head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(_IN, _OUT, bias=False), nn.LayerNorm(_OUT)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.body(x))
        return out


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operands of the three products of a Linear, as they run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, str] = {}
        self._decoded: dict[int, tuple[Tensor, torch.dtype]] = {}  # by id; holds the tensors, so ids stay theirs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note products, and which tensors are decoded FP8."""
        out = func(*args, **(kwargs or {}))
        if func in _SAME_NUMBERS and isinstance(out, Tensor) and self._format(args[0]).itemsize == 1:
            self._decoded[id(out)] = out, self._format(args[0])
        if func in _MATMULS:
            product = next((name for name, shapes in _PRODUCTS.items() if tuple(out.shape) in shapes), None)
            matrices = [arg for arg in args if isinstance(arg, Tensor) and arg.ndim == 2][:2]
            if product is not None:
                self.seen[product] = _pair(*(_SHORT[self._format(matrix)] for matrix in matrices))
        return out

    def _format(self, tensor: Any) -> torch.dtype:
        codes = getattr(tensor, "_data", tensor)  # of torchao's FP8 tensors
        dtype: torch.dtype = self._decoded[id(tensor)][1] if id(tensor) in self._decoded else codes.dtype
        return dtype


def _reduced(plugin: Any, gradient: str) -> str:
    masters = getattr(plugin, "masters", None)
    return "fp32" if masters is not None and masters.gradients.reduces else gradient


def _gathered(name: str, plugin: Any, weight: Tensor) -> str:
    if getattr(plugin, "keeps_codes", False):
        return _dtype(weight) if plugin.shards_codes else "-"
    ours = plugin if isinstance(plugin, LowPrecision) else half_under_fsdp2(name) or plugin
    if gathers_fp8(ours, ShardOptions()):
        return "e4m3"
    return _SHORT[param_dtype(ours) or weight.dtype]


def _dtype(tensor: Tensor | None) -> str:
    if tensor is None:
        return "-"
    return _SHORT[tensor.codes.dtype if isinstance(tensor, ScaledGradient) else tensor.dtype]


def _pair(first: str, second: str) -> str:
    return first if first == second else f"{first}, {second}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Fabric and the plugins log about a model that nobody asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def text(rows: list[Widths]) -> str:
    """A table for a terminal."""
    heads = {
        "precision": "precision", "output": "output", "grad_input": "grad input", "grad_weight": "grad weight",
        "weight": "weight", "gradient": "gradient", "master": "master", "moments": "moments", "ddp": "ddp",
        "fsdp2": "fsdp2",
    }  # fmt: skip
    shown = [row for row in rows if not row.reason]
    size = {name: max(len(head), *(len(getattr(row, name)) for row in rows)) for name, head in heads.items()}
    lines = ["  ".join(f"{head:<{size[name]}}" for name, head in heads.items()).rstrip()]
    for row in rows:
        cells = [f"{getattr(row, name):<{size[name]}}" for name in heads]
        lines.append("  ".join(cells).rstrip() if row in shown else f"{cells[0]}  not here: {row.reason}")
    notes = (
        "bits: e4m3 and e5m2 8; bf16, fp16 and int16 16; fp32 32. Read from a layer trained for a step on this CPU.",
        "output, grad input, grad weight: operands of the three GEMMs (gradients first), emulated where FP8.",
        "master: beside the weight; int16: what a bf16 weight lacks of fp32. ddp: what is sent of a gradient.",
        "fsdp2: what is sent of a weight; gradients are reduced in fp32. '-': none, or it does not run there.",
    )
    return "\n".join([*lines, "", *notes])
