"""The number formats of a precision: what its products read, what it keeps and sends. Every table is made of these.

A test trains a layer under every precision that runs on a CPU and compares what it sees with these rows.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final

from lightning_lowprec.gone import ENDINGS

if TYPE_CHECKING:
    from lightning_lowprec.conversion.backends import PrecisionName

BYTES: Final[dict[str, float]] = {
    "e2m1": 0.5, "e4m3": 1, "e5m2": 1, "e5m3": 1, "int8": 1, "bf16": 2, "fp16": 2, "int16": 2, "fp32": 4, "-": 0,
}  # fmt: skip
STATE: Final = ("weight", "gradient", "master", "moments", "ddp")
"""The fields that a suffix of half-precision weights changes."""


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


# ---- the grammar: a format, perhaps with an ending

FP16: Final = "-fp16"
MASTERS: Final[Mapping[str, str]] = {
    "-master": "fp32",
    "-remainder": "remainder",
    "-8bit": "8bit",
    "-sr": "stochastic",
}
"""For each suffix of half-precision weights, what is kept between steps (``MasterConfig.kept``)."""
OPTIONS: Final[Mapping[str, Mapping[str, object]]] = {
    FP16: {"base": "fp16"},
    **{suffix: {"master_weights": True if kept == "fp32" else kept} for suffix, kept in MASTERS.items()},
}
"""For each suffix, the options of the plugin that the suffix adds."""
EVERYWHERE: Final[Mapping[str, str]] = {
    "": "; bf16 elsewhere",
    FP16: "; fp16 with loss scaling elsewhere",
    "-remainder": "; bf16 weights with the exact float32 masters in 2 more bytes, bf16 elsewhere",
    "-8bit": "; bf16 weights with the exact float32 masters in 2 more bytes, moments of 8 bits, bf16 elsewhere",
    "-sr": "; bf16 weights without masters, updates rounded stochastically, bf16 elsewhere",
}
"""For each ending of a format, the end of a name's summary."""


def split(name: str) -> tuple[str, str]:
    """Return a name without its suffix, and the suffix, ``""`` if there is none. ``bf16-remainder`` has one too."""
    suffix = next((suffix for suffix in OPTIONS if name.endswith(suffix)), "")
    return name.removesuffix(suffix), suffix


def of_options(base: str, kept: str | None) -> str:
    """Return the suffix of a plugin's own name; ``kept`` is ``MasterConfig.kept``, None for float32 weights."""
    if base == "fp16":
        return FP16
    return next((suffix for suffix, masters in MASTERS.items() if masters == kept), f"-{kept}" if kept else "")


def families(names: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """Return the names without their suffixes, by the suffixes that each also has among ``names``, in their order."""
    existing = dict.fromkeys(names)
    stems: dict[tuple[str, ...], list[str]] = {}
    for name in existing:
        stem, suffix = split(name)
        if not suffix or stem not in existing:  # else it is a member of a family
            suffixes = tuple(s for s in OPTIONS if f"{name}{s}" in existing and split(f"{name}{s}")[1])
            stems.setdefault(suffixes, []).append(name)
    return stems


def in_words(names: Collection[str]) -> str:
    """Return one line with every name: families with their suffixes in place of their members."""
    parts = []
    for suffixes, stems in families(names).items():
        words = ", ".join(stems)
        if suffixes:
            each = ", each" if len(stems) > 1 else ","
            either = " or ".join(filter(None, [", ".join(suffixes[:-1]), suffixes[-1]]))
            words += f"{each} also with {either}"
        parts.append(words)
    return "; ".join(parts)


def suffix_refusal(name: str, table: "Mapping[str, PrecisionName]") -> str:
    """Return why a name of a backend does not exist with these suffixes, and what to write; ``""`` for other names."""
    if name.endswith("-bf16") and (plain := name.removesuffix("-bf16")) in table:
        return f"Write {plain!r}: what is not FP8 or int8 is bf16."
    suffixes: list[str] = []
    stem, suffix = split(name)
    while suffix:
        suffixes.insert(0, suffix)
        stem, suffix = split(stem)
    row = table.get(stem)
    if row is None or row.backend is None or not suffixes:
        return ""
    has = {FP16: row.fp16, "-master": False, **dict.fromkeys(ENDINGS, row.masters)}
    lacking = next((suffix for suffix in suffixes if not has[suffix]), None)
    if lacking is not None:
        codes = "it keeps its weights as codes, with masters of its own where they are needed"
        reason = codes if row.keeps_codes and lacking in MASTERS else "its backend has no such name"
        if lacking == "-master" and row.masters:
            reason = f"write '{stem}-remainder', which keeps the same masters in 2 bytes less"
        return f"{stem!r} has no `{lacking}`: {row.lacks.get(lacking, reason)}."
    form = next((suffix for suffix in suffixes if suffix != FP16), None)
    if FP16 in suffixes and form is not None:
        return (
            f"`-fp16` and `{form}` do not go together: names with `-fp16` keep float32 weights. Write '{stem}{form}'"
            f" for bf16, or `plugins={row.plugin.__name__}(..., base='fp16', master_weights=True)` for fp16 weights"
            " with float32 masters."
        )
    return f"A name has one suffix: write {stem + suffixes[0]!r}." if len(suffixes) > 1 else ""
