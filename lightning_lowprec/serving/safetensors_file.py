"""Write a safetensors file some rows at a time; the library's own writer holds all tensors of a file in memory.

    8 bytes: length of the header | header, JSON: {name: {dtype, shape, data_offsets}} | data, without gaps

Tensors of wider dtypes lie first, as the library orders them, so that every tensor is aligned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_HEADER_ALIGNMENT: Final = 8


@final
@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@final
class SafetensorsFile:
    """A new file, open for writing.

    Args:
        path: the file.
        tensors: all tensors of the file.
        metadata: strings for the header.
    """

    def __init__(self, path: Path, tensors: Sequence[Stored], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        at, places = 0, {}
        for tensor in sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name)):
            places[tensor.name] = at, at + tensor.size
            header[tensor.name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.size],
            }
            at += tensor.size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        begin = 8 + len(text)
        self._left = {name: [begin + first, begin + last] for name, (first, last) in places.items()}
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, rows: Tensor) -> None:
        """Append elements to a tensor: (...) contiguous, on any device."""
        content: Any = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        place = self._left[name]
        assert place[0] + content.nbytes <= place[1], name
        self._file.seek(place[0])
        self._file.write(memoryview(content))
        place[0] += content.nbytes

    def close(self) -> None:
        """Close the file, which is complete."""
        self._file.close()
        unfinished = [name for name, (at, end) in self._left.items() if at != end]
        assert not unfinished, unfinished

    def abandon(self) -> None:
        """Close the file, which is not complete. That its last bytes do not fit on the disk is no second error."""
        with suppress(OSError):
            self._file.close()
