"""The files of a folder: written with the identity of their save, and checked before they are read.

A shard file begins with a header of 64 bytes, which names the save. The offsets in the table of contents count from the
start of the file, so torch's own tools read the file too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

from torch.distributed.checkpoint.filesystem import FileSystem

from lightning_lowprec.fsdp2.checked_file import FileRecord, crc32_of, writing
from lightning_lowprec.fsdp2.torch_file import refusal

SHARD: Final = ".distcp"
"""The suffix of torch.distributed.checkpoint."""
HEADER: Final = b"lightning_lowprec save "
HEADER_BYTES: Final = 64
"""The alignment of tensors in torch's archives stays as it is."""
_WAY_OUT: Final = "Load another checkpoint."


@final
class WrittenShards(FileSystem):
    """A file system for writing: shard files get a header, and their sizes and checksums are kept in ``records``."""

    def __init__(self, save: str) -> None:
        self._header = (HEADER + save.encode()).ljust(HEADER_BYTES - 1) + b"\n"
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file."""
        path = Path(path)
        if path.suffix != SHARD:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with writing(path) as checked:
            checked.write(self._header)
            yield checked
        self.records[path.name] = checked.record


@final
class NamedFiles(FileSystem):
    """A file system for reading: what goes wrong while a file is read becomes an error that names the file."""

    def __init__(self, weights_only: bool | None) -> None:
        self._weights_only = weights_only

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"{str(path)!r} is missing. Copy the whole folder, or load another checkpoint.")
        with super().create_stream(path, mode) as stream:
            try:
                yield stream
            except Exception as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise refusal(Path(path), error, self._weights_only) or ValueError(
                    f"{str(path)!r} is damaged, or belongs to another save ({type(error).__name__}: {reason})."
                    f" {_WAY_OUT}"
                ) from error


def save_of(shard: Path) -> str | None:
    """Return the identity of the save that a shard file belongs to; None if the file does not say."""
    with shard.open("rb") as file:
        start = file.read(HEADER_BYTES)
    complete = len(start) == HEADER_BYTES and start.startswith(HEADER)
    return start.removeprefix(HEADER).decode(errors="replace").strip() if complete else None


def check_file(path: Path, record: FileRecord, save: str, *, verify: bool) -> None:
    """Raise if a file of a folder is missing, is of another save, or (``verify``) has another checksum.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file is not the file that was saved.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(path)!r} is missing: the manifest of the checkpoint lists the file. Copy the whole folder, or load"
            " another checkpoint."
        )
    is_shard = path.suffix == SHARD
    found = save_of(path) if is_shard else None
    if found not in (None, save):
        raise ValueError(other_save(path, found, save))
    size = path.stat().st_size
    if size != record.size and (is_shard or verify):
        kind = "is damaged" if is_shard else "is damaged, or belongs to another save"
        raise ValueError(f"{str(path)!r} {kind}: it has {size} bytes, and {record.size} were saved. {_WAY_OUT}")
    if is_shard and found is None:
        raise ValueError(f"{str(path)!r} is damaged: its header does not name the save {save}. {_WAY_OUT}")
    if verify and (crc32 := crc32_of(path)) != record.crc32:
        kind = "is damaged" if is_shard else "is damaged, or belongs to another save"
        raise ValueError(
            f"{str(path)!r} {kind}: its checksum (CRC-32) is {crc32:08x}, and {record.crc32:08x} was saved. {_WAY_OUT}"
            " `verify_checkpoints=False` of the strategy loads the file without this check."
        )


def other_save(path: Path, found: object, save: str) -> str:
    """Return the message for a file of another save."""
    return (
        f"{str(path)!r} belongs to another save ({found}) than the manifest of its folder ({save}). Files of two saves"
        " cannot be mixed: copy whole folders, or load another checkpoint."
    )
