"""The manifest of a folder of shards: JSON that says which save the folder is, and which files with which checksums.

    {"format": 2, "save": "9f0c...", "step": 100,
     "files": {"__0_0.distcp": {"size": 5312, "crc32": "0a1b2c3d"}, ..., ".metadata": {...}, "meta.pt": {...}},
     "crc32": "..."}

Every file names the save: a shard file in a header of 64 bytes, ``meta.pt`` under the key ``SAVE``, the table of
contents as torch's ``save_id``. The offsets in the table count from the start of a shard file, so torch's own tools
read the folder too. Format 1, of 0.2.0, had a second table in the manifest, and no checksum of ``.metadata``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from lightning_lowprec.checkpoints.agreement import on_all_ranks, rank_and_ranks
from lightning_lowprec.checkpoints.files import CheckedFile, FileRecord, crc32_of

MANIFEST: Final = "lightning_lowprec.json"
META: Final = "meta.pt"
"""The file that holds everything but the tensors of model and optimizers; the name is Lightning's."""
SHARD: Final = ".distcp"
"""The suffix of torch.distributed.checkpoint."""
SAVE: Final = "lightning_lowprec_save"
"""The key of the save's identity in ``meta.pt``."""
FORMAT: Final = 2
CHECKSUM: Final = b', "crc32": '
"""Ends the manifest; the CRC-32 of all bytes before follows."""
PROGRESS: Final = ("epoch", "global_step", "step")
"""Counters of Trainer and, by convention, Fabric users; stored for whoever reads the manifest."""
HEADER: Final = b"lightning_lowprec save "
HEADER_BYTES: Final = 64
"""The alignment of tensors in torch's archives stays."""
_WAY_OUT: Final = "Load another checkpoint."


@final
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The identity of one save, 32 hexadecimal digits, and the size and checksum of every other file."""

    save: str
    files: Mapping[str, FileRecord]

    def write(self, folder: Path, rest: Mapping[str, Any]) -> None:
        """Write the manifest, on rank 0, as the last file of the folder; ``rest`` has the progress."""
        content = {
            "format": FORMAT,
            "save": self.save,
            "torch": torch.__version__,
            **{name: rest[name] for name in PROGRESS if type(rest.get(name)) is int},
            "files": {name: {"size": r.size, "crc32": f"{r.crc32:08x}"} for name, r in self.files.items()},
        }
        text = json.dumps(content).encode().removesuffix(b"}")
        with CheckedFile(folder / MANIFEST) as file:
            file.write(text + CHECKSUM + f'"{zlib.crc32(text):08x}"}}'.encode())

    def check(self, folder: Path, *, verify: bool) -> None:
        """Check the files of the folder, each on one rank; all ranks raise if one file is not as it was saved.

        The ranks that wrote a folder check what they wrote and, most often, read next.
        """
        rank, ranks = rank_and_ranks()

        def check_part() -> None:
            for name, record in list(self.files.items())[rank::ranks]:
                _check_file(folder / name, record, self.save, verify=verify)

        on_all_ranks(check_part)


def read(folder: Path, *, verify: bool) -> Manifest | None:
    """Return the manifest of a folder; None for a folder that this package did not write, or not by this version.

    A damaged manifest, or one of a later version, raises; so does, with ``verify``, one that is missing.
    """
    path = folder / MANIFEST
    if not path.is_file():
        shards = sorted(folder.glob(f"*{SHARD}")) if verify else []
        if shards and _save_of(shards[0]) is not None:
            raise FileNotFoundError(
                f"{str(path)!r} is missing, and the shards of the folder were written with it. Copy the whole"
                " folder; `verify_checkpoints=False` of the strategy reads the folder without its manifest."
            )
        return None
    try:
        content = path.read_bytes()
        stored = json.loads(content)
        if stored["crc32"] != f"{zlib.crc32(content[: content.rfind(CHECKSUM)]):08x}":
            raise ValueError("its checksum (CRC-32) differs")
        if stored["format"] in (1, FORMAT):
            files = {name: FileRecord(r["size"], int(r["crc32"], 16)) for name, r in stored["files"].items()}
            for name in files:
                if Path(name).name != name:
                    raise ValueError(f"the file {name!r} is not in the folder")
            return Manifest(save=stored["save"], files=files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}. {_WAY_OUT}") from error
    raise ValueError(
        f"{str(path)!r} has the format {stored['format']!r}, and this version of lightning_lowprec reads {FORMAT}."
        " Install a later version."
    )


def header(save: str) -> bytes:
    """Return the beginning of every shard file of a save."""
    return (HEADER + save.encode()).ljust(HEADER_BYTES - 1) + b"\n"


def check_save(path: Path, stored: object, save: str) -> None:
    """Raise ValueError if a file names another save than the manifest of its folder."""
    if stored != save:
        raise ValueError(
            f"{str(path)!r} belongs to another save ({stored}) than the manifest of its folder ({save}). Files of two"
            " saves cannot be mixed: copy whole folders, or load another checkpoint."
        )


def _save_of(shard: Path) -> str | None:
    """Return the identity of the save that a shard file belongs to; None if the file does not say."""
    with shard.open("rb") as file:
        start = file.read(HEADER_BYTES)
    complete = len(start) == HEADER_BYTES and start.startswith(HEADER)
    return start.removeprefix(HEADER).decode(errors="replace").strip() if complete else None


def _check_file(path: Path, record: FileRecord, save: str, *, verify: bool) -> None:
    """Raise if a file of a folder is missing, is of another save, or (``verify``) has another checksum."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(path)!r} is missing: the manifest of the checkpoint lists the file. Copy the whole folder, or load"
            " another checkpoint."
        )
    is_shard = path.suffix == SHARD
    stored = _save_of(path) if is_shard else None
    if stored is not None:
        check_save(path, stored, save)
    kind = "is damaged" if is_shard else "is damaged, or belongs to another save"
    size = path.stat().st_size
    if size != record.size and (is_shard or verify):
        raise ValueError(f"{str(path)!r} {kind}: it has {size} bytes, and {record.size} were saved. {_WAY_OUT}")
    if is_shard and stored is None:
        raise ValueError(f"{str(path)!r} is damaged: its header does not name the save {save}. {_WAY_OUT}")
    if verify and (crc32 := crc32_of(path)) != record.crc32:
        raise ValueError(
            f"{str(path)!r} {kind}: its checksum (CRC-32) is {crc32:08x}, and {record.crc32:08x} was saved. {_WAY_OUT}"
            " `verify_checkpoints=False` of the strategy loads the file without this check."
        )
