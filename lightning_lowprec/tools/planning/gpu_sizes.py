"""Read the memory of a GPU: ``141GB``, ``80GiB``, or the name of a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

UNITS: Final[Mapping[str, int]] = {"mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 2**20, "gib": 2**30, "tib": 2**40}
GPUS: Final[Mapping[str, tuple[int, tuple[int, int]]]] = {
    "GB300": (288, (10, 3)), "B300": (288, (10, 3)), "GB200": (186, (10, 0)), "B200": (180, (10, 0)),
    "H200": (141, (9, 0)), "GH200": (96, (9, 0)), "H100": (80, (9, 0)), "H800": (80, (9, 0)), "H20": (96, (9, 0)),
    "A100": (80, (8, 0)), "A800": (80, (8, 0)), "A40": (48, (8, 6)), "A10": (24, (8, 6)), "A6000": (48, (8, 6)),
    "RTX 6000 Ada": (48, (8, 9)), "RTX PRO 6000": (96, (12, 0)), "L40S": (48, (8, 9)), "L40": (48, (8, 9)),
    "L4": (24, (8, 9)), "RTX 5090": (32, (12, 0)), "RTX 5080": (16, (12, 0)), "RTX 4090": (24, (8, 9)),
    "RTX 4080": (16, (8, 9)), "RTX 3090": (24, (8, 6)), "V100": (32, (7, 0)), "T4": (16, (7, 5)),
}  # fmt: skip
"""The memory in GB that the maker names, and the compute capability."""
_HOPPER: Final = (9, 0)
_PREFIXES: Final = ("nvidia", "geforce", "tesla")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU.

    Args:
        words: as the user wrote it.
        size: bytes.
        capability: the compute capability; a Hopper GPU's where only a size is given.
    """

    words: str
    size: int
    capability: tuple[int, int] = _HOPPER


def read_gpu(text: str) -> Gpu:
    """Return the GPU that ``text`` means.

    Raises:
        ValueError: neither a size nor the name of a GPU.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if match is not None and match[2].lower() in UNITS and float(match[1]) > 0:
        return Gpu(words=text, size=round(float(match[1]) * UNITS[match[2].lower()]))
    names = {_plain(name): name for name in GPUS}
    found = names.get(_plain(text))
    if found is None:
        raise ValueError(
            f"`fits={text!r}` is not valid; expected a size such as 141GB or 80GiB ({', '.join(UNITS)}), or a GPU:"
            f" {', '.join(GPUS)}."
        )
    gigabytes, capability = GPUS[found]
    return Gpu(words=f"{found} ({gigabytes} GB)", size=gigabytes * 10**9, capability=capability)


def _plain(name: str) -> str:
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if word and word not in _PREFIXES]
    plain = "".join(words)
    return plain.removeprefix("rtx") if plain.startswith("rtx") and not plain.startswith("rtxpro") else plain
