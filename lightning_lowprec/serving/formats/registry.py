"""The formats by name."""

from __future__ import annotations

from typing import Final, Literal, get_args

from lightning_lowprec.serving.formats import compressed_tensors, hf, hf_fp8_block, torchao
from lightning_lowprec.serving.formats.base import Format

FormatName = Literal["hf", "hf-fp8-block", "compressed-tensors", "torchao"]
NAMES: Final[tuple[FormatName, ...]] = get_args(FormatName)
_FORMATS: Final[dict[str, Format]] = {
    module.FORMAT.name: module.FORMAT for module in (hf, hf_fp8_block, compressed_tensors, torchao)
}


def find(name: str) -> Format:
    """Return the format of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in _FORMATS:
        raise ValueError(f"`format={name!r}` is not valid; expected one of: {', '.join(NAMES)}.")
    return _FORMATS[name]
