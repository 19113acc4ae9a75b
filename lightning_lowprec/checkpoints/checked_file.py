"""Write the files of a checkpoint with a checksum, and compare what lies on disk with the checksum.

The checksum is the CRC-32 of ``zlib``. It finds every flipped bit, and all but one in 2**32 of larger changes. It is no
protection against an attacker, who can write a new checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, final

READ_AT_ONCE: Final = 2**24
"""Bytes; larger blocks are not read faster."""


@dataclass(frozen=True)
class FileRecord:
    """The size in bytes and the CRC-32 of a whole file."""

    size: int
    crc32: int


@final
class CheckedStream:
    """A file that is written once, from start to end: counts its bytes and computes its checksum."""

    def __init__(self, file: IO[bytes], path: Path, checked: bool) -> None:
        self._file = file
        self._path = path
        self._checked = checked
        self._size = 0
        self._crc32 = 0
        self.error: OSError | None = None
        """Why a write failed: torch reports another error, which does not say why."""

    @property
    def record(self) -> FileRecord:
        """Return size and checksum of what was written so far; the checksum is 0 where none is computed."""
        return FileRecord(self._size, self._crc32)

    def write(self, data: Any) -> int:
        """Append bytes."""
        try:
            self._file.write(data)
        except OSError as error:
            error.filename = str(self._path)
            self.error = error
            raise
        if self._checked:
            self._crc32 = zlib.crc32(data, self._crc32)
        size = memoryview(data).nbytes
        self._size += size
        return size

    def __getattr__(self, name: str) -> Any:
        """Return what else a file has: ``flush``, ``tell``, ``fileno``."""
        return getattr(self._file, name)


@contextmanager
def writing(path: Path, *, checked: bool = True) -> Iterator[CheckedStream]:
    """Open a new file for writing, with a checksum or (not ``checked``) without.

    A failed write raises its OSError, whatever the writer makes of the failure.
    """
    with path.open("wb") as file:
        stream = CheckedStream(file, path, checked)
        try:
            yield stream
        except Exception:
            if stream.error is not None:
                raise stream.error from None
            raise


def crc32_of(path: Path) -> int:
    """Return the CRC-32 of a whole file."""
    block = memoryview(bytearray(READ_AT_ONCE))
    crc32 = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            crc32 = zlib.crc32(block[:count], crc32)
    return crc32
