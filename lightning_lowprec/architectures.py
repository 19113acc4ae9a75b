"""The architectures of devices that the table of :mod:`~lightning_lowprec.runs_where` knows, as plain data.

An architecture stands for every device with the same kernels: ``sm_80`` for compute capabilities 8.0 to 8.8, ``sm_120``
for 12.0 and 12.1. A device is described by three facts (its type, its compute capability, its ROCm architecture), so
that an answer for a device needs no such device.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

FP8Format = Literal["e4m3fn", "e4m3fnuz"]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Devices with the same kernels."""

    key: str
    """The name in tables and for ``lowprec doctor --device``: ``"sm_90"``."""
    title: str
    """The name in messages: ``"NVIDIA 9.0 (Hopper)"``."""
    fp8: FP8Format | None = None
    """The float8 format of four exponent bits that its matrix kernels multiply; None: it has none."""
    emulates: bool = True
    """Whether tensors of float8 can be there at all, so that FP8 can be emulated."""


def _nvidia(major: int, minor: int, title: str, fp8: FP8Format | None = None) -> tuple[tuple[int, int], Architecture]:
    return (major, minor), Architecture(key=f"sm_{major}{minor}", title=title, fp8=fp8)


_NVIDIA: Final = (
    _nvidia(6, 0, "NVIDIA 6.x (Pascal) and older"),
    _nvidia(7, 0, "NVIDIA 7.0 (Volta)"),
    _nvidia(7, 5, "NVIDIA 7.5 (Turing)"),
    _nvidia(8, 0, "NVIDIA 8.0 to 8.8 (Ampere)"),
    _nvidia(8, 9, "NVIDIA 8.9 (Ada)", "e4m3fn"),
    _nvidia(9, 0, "NVIDIA 9.0 (Hopper)", "e4m3fn"),
    _nvidia(10, 0, "NVIDIA 10.x (Blackwell, data centre)", "e4m3fn"),
    _nvidia(11, 0, "NVIDIA 11.x (Thor)", "e4m3fn"),
    _nvidia(12, 0, "NVIDIA 12.x (RTX 50, RTX PRO, Spark)", "e4m3fn"),
    _nvidia(13, 0, "NVIDIA 13.0 and newer", "e4m3fn"),
)
"""NVIDIA's architectures, by the compute capability that each one begins with."""
_AMD: Final = (
    (r"gfx90[0-9a-f]", Architecture(key="gfx90a", title="AMD MI200 and older")),
    (r"gfx94[012]", Architecture(key="gfx942", title="AMD MI300", fp8="e4m3fnuz")),
    (r"gfx950", Architecture(key="gfx950", title="AMD MI350", fp8="e4m3fn")),
    (r"gfx1[01]\d\d", Architecture(key="gfx1100", title="AMD RDNA 1 to 3")),
    (r"gfx120[01]", Architecture(key="gfx1200", title="AMD RDNA 4", fp8="e4m3fn")),
)
"""AMD's architectures, by regular expressions of the name that ROCm gives a device."""
_OTHERS: Final = (
    Architecture(key="xpu", title="Intel XPU"),
    Architecture(key="mps", title="Apple MPS", emulates=False),
    Architecture(key="cpu", title="CPU"),
)
OTHER: Final = Architecture(key="other", title="a device that the table does not know")
"""Any device without a column: of a newer ROCm architecture, or of another type."""

ARCHITECTURES: Final[dict[str, Architecture]] = {
    found.key: found for found in (*(found for _, found in _NVIDIA), *(found for _, found in _AMD), *_OTHERS, OTHER)
}


def classify(type: str, capability: tuple[int, int] | None = None, gcn: str | None = None) -> Architecture:
    """Return the architecture of a device of a ``type`` of torch: ROCm's GPUs are ``"cuda"`` too.

    ``gcn`` is ROCm's name of the GPU, such as ``"gfx90a:sramecc+:xnack-"``, and counts before the ``capability``.
    """
    if type != "cuda":
        return next((other for other in _OTHERS if other.key == type), OTHER)
    if gcn is not None:
        return next((amd for pattern, amd in _AMD if re.fullmatch(pattern, gcn.split(":")[0])), OTHER)
    if capability is None:
        return OTHER
    return next((nvidia for first, nvidia in reversed(_NVIDIA) if capability >= first), _NVIDIA[0][1])


def named(name: str) -> Architecture:
    """Return the architecture of a name: a key of the table, or another member such as ``sm_86`` and ``gfx1201``."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    sm = re.fullmatch(r"sm_?(\d+)(\d)[af]?", name)
    member = classify("cuda", gcn=name) if sm is None else classify("cuda", (int(sm[1]), int(sm[2])))
    if member is OTHER:
        raise ValueError(f"`device={name!r}` is no architecture; expected one of: {', '.join(ARCHITECTURES)}.")
    return member
