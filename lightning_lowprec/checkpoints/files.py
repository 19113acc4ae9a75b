"""Write and read the files of a checkpoint; an error names the file and says what is wrong with the file.

Files are written with a checksum, the CRC-32 of ``zlib``, which is no protection against an attacker. ``torch.save``
writes a zip archive with a CRC-32 per tensor. ``torch.load`` does not compare them, :func:`check_records` does.
"""

import io
import os
import re
import zipfile
import zlib
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final, NamedTuple, final

import torch
from typing_extensions import override

from lightning_lowprec.messages import in_units

READ_AT_ONCE: Final = 2**24
"""Bytes; larger blocks are not read faster."""
FORCE_SAFE: Final = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FORCE_UNSAFE: Final = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
ZIP_START: Final = b"PK\x03\x04"


class FileRecord(NamedTuple):
    """The size in bytes and the CRC-32 of a whole file."""

    size: int
    crc32: int


@final
class CheckedFile(io.BufferedWriter):
    """A new file that is written once, from start to end: counts its bytes and, if ``checked``, computes its checksum.

    A ``with`` ends with the OSError of a failed write: torch reports another error, which does not say why.
    """

    def __init__(self, path: Path, *, checked: bool = True) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._path, self._checked = path, checked
        self.record = FileRecord(0, 0)
        """Size and checksum of what was written so far; the checksum is 0 where none is computed."""
        self._error: OSError | None = None

    @override
    def write(self, data: Any) -> int:
        try:
            size = super().write(data)
        except OSError as error:
            error.filename = str(self._path)
            self._error = error
            raise
        crc32 = zlib.crc32(data, self.record.crc32) if self._checked else 0
        self.record = FileRecord(self.record.size + size, crc32)
        return size

    @override
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        if self._error is not None and isinstance(error, Exception):
            raise self._error from None


def crc32_of(path: Path) -> int:
    """Return the CRC-32 of a whole file."""
    block = memoryview(bytearray(READ_AT_ONCE))
    crc32 = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            crc32 = zlib.crc32(block[:count], crc32)
    return crc32


# ---- files of torch.save


def write(content: object, path: Path, *, checked: bool = True) -> FileRecord:
    """Write ``content`` by ``torch.save``; return the size of the file and, if ``checked``, its checksum."""
    with CheckedFile(path, checked=checked) as file:
        torch.save(content, file)
    return file.record


def read(path: Path, weights_only: bool | None) -> Any:
    """Return the content of a file of ``torch.save``, mapped into memory: tensors are read when they are used.

    ``weights_only`` refuses objects whose reading can run code, by UnpicklingError. None is torch's default, True,
    which ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` changes. ``TORCH_FORCE_WEIGHTS_ONLY_LOAD`` wins over False. A file that
    is damaged, or is none of ``torch.save``, raises ValueError.
    """
    is_zip = _starts_like_zip(path)
    try:
        return torch.load(path, mmap=is_zip, map_location="cpu", weights_only=weights_only)
    except Exception as error:
        if isinstance(error, RuntimeError) and FORCE_SAFE in str(error):
            raise  # both variables are set
        if isinstance(error, RuntimeError) and "unable to mmap" in str(error):
            raise OSError(
                f"{str(path)!r} has {in_units(path.stat().st_size)}, and this system maps no more than its memory"
                " and swap. Add swap, or set `vm.overcommit_memory=1`."
            ) from error
        raise refused_object(path, error, weights_only) or _damaged(path, is_zip, error) from error


def check_records(path: Path, part: int = 0, parts: int = 1) -> bool:
    """Compare the checksums of a file of ``torch.save``, or one of ``parts`` of about one size; return if it has some.

    Files have none in torch's format of before 1.6, and where ``torch.serialization.set_crc32_options(False)`` was
    called before they were written. A damaged file raises ValueError.
    """
    if not _starts_like_zip(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            records = sorted(archive.infolist(), key=lambda record: record.file_size, reverse=True)
            if not any(record.CRC for record in records):
                return False
            for record in records[part::parts]:
                with archive.open(record) as content:
                    while content.read(READ_AT_ONCE):
                        pass  # zipfile raises at the end of a record with another checksum
    except Exception as error:  # zipfile raises many kinds
        raise _damaged(path, True, error) from error
    return True


def runs_code(weights_only: bool | None) -> bool:
    """Return whether pickles may run code, as torch reads its variables; if both are set, ``torch.load`` raises."""
    safe, unsafe = (
        os.environ.get(name, "0").lower() in ("1", "y", "yes", "true") for name in (FORCE_SAFE, FORCE_UNSAFE)
    )
    return not safe and (unsafe if weights_only is None else not weights_only)


def remedy(weights_only: bool | None) -> str:
    """Return how to let pickles run code, given how ``weights_only`` was passed, as the end of an error message."""
    if not runs_code(False):
        return f"The environment variable {FORCE_SAFE} forbids to read them; if you trust the file, unset it."
    passed = "pass `weights_only=False` where you load" + (" (you pass True)" if weights_only else "")
    forced = "" if weights_only else f", or set the environment variable {FORCE_UNSAFE}=1"
    return f"If you trust the file, {passed}{forced}."


def refused_object(path: Path, error: Exception, weights_only: bool | None) -> UnpicklingError | None:
    """Return the error to raise if ``torch.load`` refused an object in ``path``; None if ``error`` says otherwise."""
    name = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, UnpicklingError) else None
    if name is None:
        return None
    return UnpicklingError(
        f"{str(path)!r} holds an object of {name[1].removesuffix('.')}, and reading objects other than tensors and"
        f" plain values can run code. {remedy(weights_only)} To allow one class:"
        " `torch.serialization.add_safe_globals`."
    )


def _starts_like_zip(path: Path) -> bool:
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; expected the file of a checkpoint.")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}.")
    with path.open("rb") as file:
        start = file.read(len(ZIP_START))
    if not start:
        raise ValueError(f"{str(path)!r} is damaged: the file is empty. Load another checkpoint.")
    return start == ZIP_START


def _damaged(path: Path, is_zip: bool, error: Exception) -> ValueError:
    reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0].removesuffix(".")
    if not is_zip:
        return ValueError(
            f"{str(path)!r} is no file of `torch.save`, or is damaged ({os.path.getsize(path)} bytes; it does not begin"
            " like one)."
        )
    return ValueError(
        f"{str(path)!r} is damaged, or was cut off while it was written or copied ({os.path.getsize(path)} bytes;"
        f" {type(error).__name__}: {reason}). Load another checkpoint."
    )
