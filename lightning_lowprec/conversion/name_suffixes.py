"""Suffixes of names for ``precision=``: the options that each one stands for, and lists of names by their suffixes.

``fp8-tensorwise-remainder`` is the name ``fp8-tensorwise`` with the suffix ``-remainder``. A backend says which of its
names have suffixes (``PrecisionName.fp16`` and ``PrecisionName.masters``); a name has at most one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

FP16: Final = "-fp16"
MASTERS: Final[Mapping[str, str]] = {"-master": "fp32", "-remainder": "remainder", "-sr": "stochastic"}
"""For each suffix of half-precision weights, the form of the masters (``MasterConfig.form``)."""
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    FP16: {"base": "fp16"},
    "-master": {"master_weights": True},
    "-remainder": {"master_weights": "remainder"},
    "-sr": {"master_weights": "stochastic"},
}
"""For each suffix, the options of the plugin that the suffix adds."""
EVERYWHERE: Final[Mapping[str, str]] = {
    "": "; bf16 elsewhere",
    FP16: "; fp16 with loss scaling elsewhere",
    "-master": "; bf16 weights with float32 masters, bf16 elsewhere",
    "-remainder": "; bf16 weights with the exact float32 masters in 2 more bytes, bf16 elsewhere",
    "-sr": "; bf16 weights without masters, updates rounded stochastically, bf16 elsewhere",
}
"""For each suffix, the end of a name's summary."""


def split(name: str) -> tuple[str, str]:
    """Return a name without its suffix, and the suffix, ``""`` if there is none. ``bf16-remainder`` has one too.

    ``bf16-lean-sr`` has none: it differs from ``bf16-lean`` in other ways than a suffix says.
    """
    if name.endswith("-lean-sr"):
        return name, ""
    suffix = next((suffix for suffix in OPTIONS if name.endswith(suffix)), "")
    return name.removesuffix(suffix), suffix


def split_all(name: str) -> tuple[str, list[str]]:
    """Return a name without any suffixes, and its suffixes from left to right, however many there are."""
    found: list[str] = []
    stem, suffix = split(name)
    while suffix:
        found.insert(0, suffix)
        stem, suffix = split(stem)
    return stem, found


def of_options(base: str, form: str | None) -> str:
    """Return the suffix of a plugin's own name.

    Args:
        base: the dtype outside of FP8, ``"bf16"`` or ``"fp16"``.
        form: of the masters (``MasterConfig.form``), None for float32 weights.
    """
    if base == "fp16":
        return FP16
    return next((suffix for suffix, masters in MASTERS.items() if masters == form), "")


def families(names: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """Return the names without their suffixes, by the suffixes that each also has among ``names``, in their order."""
    listed = list(names)
    known = set(listed)
    found: dict[tuple[str, ...], list[str]] = {}
    for name in listed:
        if split(name)[1] and split(name)[0] in known:
            continue  # a member of a family
        found.setdefault(tuple(s for s in OPTIONS if f"{name}{s}" in known and split(f"{name}{s}")[1]), []).append(name)
    return found


def in_words(names: Collection[str], *, quoted: bool = False) -> str:
    """Return one line with every name: families with their suffixes in place of their members.

    Args:
        names: the names.
        quoted: whether names and suffixes stand in quotes, as in error messages.
    """
    shown = repr if quoted else str
    parts = []
    for suffixes, stems in families(names).items():
        words = ", ".join(map(shown, stems))
        if suffixes:
            each = ", each" if len(stems) > 1 else ","
            words += f"{each} also with {_either([shown(suffix) for suffix in suffixes])}"
        parts.append(words)
    return "; ".join(parts)


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
