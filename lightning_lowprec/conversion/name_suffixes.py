"""The grammar of names for ``precision=``: a format, perhaps with an ending.

``fp8-hybrid-remainder`` is the format ``fp8-hybrid`` with the ending ``-remainder``. A backend says which of its
formats have endings (``PrecisionName.fp16`` and ``PrecisionName.masters``); a name has at most one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from lightning_lowprec.gone import ENDINGS

if TYPE_CHECKING:
    from lightning_lowprec.conversion.backends import PrecisionName

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


def suffix_refusal(name: str, table: Mapping[str, PrecisionName]) -> str:
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
