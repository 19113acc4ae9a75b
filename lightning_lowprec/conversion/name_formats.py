"""The number formats of a precision: what its products read, what it keeps and sends. Every table is made of these.

A test trains a layer under every precision that runs on a CPU and compares what it sees with these rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final, final

BYTES: Final[dict[str, float]] = {
    "e2m1": 0.5, "e4m3": 1, "e5m2": 1, "e5m3": 1, "int8": 1, "bf16": 2, "fp16": 2, "int16": 2, "fp32": 4, "-": 0,
}  # fmt: skip
STATE: Final = ("weight", "gradient", "master", "moments", "ddp")
"""The fields that a suffix of half-precision weights changes."""


@final
@dataclass(frozen=True, kw_only=True)
class Formats:
    """Formats of a Linear that the precision converts; "-": there is none; two where two tensors differ."""

    output: str
    """The operands of the forward."""
    grad_input: str
    """The operands of the gradient of the input, the gradient first."""
    grad_weight: str
    samples: str = "apart"
    """``"one scale"`` if the forward of a sample depends on the others of its batch, and of a token on later tokens."""
    weight: str = "fp32"
    gradient: str = "fp32"
    master: str = "-"
    """Kept beside the weight; int16 holds the digits of fp32 that a bf16 weight lacks."""
    moments: str = "fp32"
    """Of AdamW."""
    ddp: str = "fp32"
    """In which a gradient is sent."""
    fsdp2: str = "bf16"
    """In which a weight is sent."""

    @property
    def bytes_per_parameter(self) -> tuple[float, float, float, float]:
        """Bytes of the weight, of its gradient, of master and moments, and of the weight as FSDP2 sends it."""
        moments = self.moments.split(", ") * (1 if "," in self.moments else 2)
        kept = BYTES[self.master] + sum(BYTES[moment] for moment in moments)
        return BYTES[self.weight], BYTES[self.gradient], kept, BYTES[self.fsdp2]

    @property
    def keeps_codes(self) -> bool:
        """Whether weights are kept as codes with a scale (MS-AMP), whose gradients have 8 bits."""
        return BYTES[self.gradient] == 1

    def row(self) -> dict[str, str]:
        """Return the formats by column."""
        return {column: getattr(self, column) for column in COLUMNS}


COLUMNS: Final = tuple(field.name for field in fields(Formats))


def all_in(format: str, **state: str) -> Formats:
    """Return formats whose products read one format."""
    return Formats(output=format, grad_input=format, grad_weight=format, **state)


ONE_SCALE: Final = "one scale"
"""A scale per tensor, from its largest value: :attr:`Formats.samples`."""
HYBRID: Final = Formats(
    output="e4m3", grad_input="e5m2, e4m3", grad_weight="e5m2, e4m3", samples=ONE_SCALE, fsdp2="e4m3"
)
"""Gradients in e5m2, and FSDP2 gathers codes."""
E4M3_TENSORWISE: Final = replace(HYBRID, grad_input="e4m3", grad_weight="e4m3")


def _true(format: str, **state: str) -> Formats:
    return all_in(format, **{"weight": format, "gradient": format, "ddp": format, "fsdp2": format, **state})


LIGHTNINGS: Final = {
    "32-true": all_in("fp32", fsdp2="fp32"),
    "bf16-mixed": all_in("bf16"),
    "bf16-true": _true("bf16", moments="bf16"),
    "16-mixed": all_in("fp16", fsdp2="fp16"),
    "16-true": _true("fp16", moments="fp16"),
}
"""Lightning's own precisions."""
HALF: Final = {
    "half-auto": all_in("bf16"),
    "bf16-master": _true("bf16", master="fp32"),
    "fp16-master": _true("fp16", master="fp32"),
    "bf16-remainder": _true("bf16", master="int16"),
    "bf16-8bit": _true("bf16", master="int16", moments="e4m3, e5m3"),
    "bf16-sr": _true("bf16"),
}
"""Half-precision weights; the suffixes of other names (``-remainder``, for example) have the same state."""

NO_GROUPED_PRODUCT: Final = "no Linear (stacked experts)"
"""Why a precision without grouped products in FP8 keeps stacked experts."""
EXPERTS_NEED_TORCHAO: Final = "stacked experts ('fp8-hybrid', by torchao, runs them in FP8)"
"""Why Transformer Engine keeps stacked experts."""
GROUPED_ROUND_TO_BF16: Final = "stacked experts (kernels for grouped products round to bf16, and the base is fp16)"
"""Why a precision with fp16 outside of FP8 keeps stacked experts."""
