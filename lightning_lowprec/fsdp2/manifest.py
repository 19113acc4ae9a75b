"""The manifest of a folder of shards: JSON that says which save the folder is, and what lies where in which file.

    {"format": 1, "save": "9f0c...", "step": 100,
     "files": {"__0_0.distcp": {"size": 5312, "crc32": "0a1b2c3d"}, ..., "meta.pt": {...}},
     "entries": {"model.fc.weight": {"path": ["model", "fc.weight"], "dtype": "float32", "size": [64, 32],
                                     "pieces": [{"offsets": [0, 0], "sizes": [32, 32], "file": "__0_0.distcp",
                                                 "at": 64, "length": 5248}, ...]}, ...},
     "crc32": "..."}

Nothing in the manifest is code, so reading a folder of this package runs none. ``.metadata`` of
torch.distributed.checkpoint is written too, for torch's own tools, and is not read here.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from lightning_lowprec.fsdp2 import table
from lightning_lowprec.fsdp2.agreement import on_all_ranks, rank_and_ranks
from lightning_lowprec.fsdp2.checked_file import FileRecord, writing
from lightning_lowprec.fsdp2.shard_files import SHARD, check_file, save_of

MANIFEST: Final = "lightning_lowprec.json"
META: Final = "meta.pt"
"""The file that holds everything but the tensors of model and optimizers; the name is Lightning's."""
SAVE: Final = "lightning_lowprec_save"
"""The key of the save's identity in ``meta.pt``."""
FORMAT: Final = 1
CHECKSUM: Final = b', "crc32": '
"""Ends the manifest; the CRC-32 of all bytes before follows."""
PROGRESS: Final = ("epoch", "global_step", "step")
"""Counters of Trainer and, by convention, Fabric users; stored for whoever reads the manifest."""


@final
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The identity, the files and the table of contents of one save.

    Args:
        save: the identity, 32 hexadecimal digits, which every file of the save carries.
        files: size and checksum of every file but ``.metadata``, which is not read.
        table: what the shards hold.
        progress: epoch and step, if the checkpoint has them.
    """

    save: str
    files: Mapping[str, FileRecord]
    table: table.Table
    progress: Mapping[str, int]

    def write(self, folder: Path) -> None:
        """Write the manifest, on rank 0, as the last file of the folder."""
        content = {
            "format": FORMAT,
            "save": self.save,
            "torch": torch.__version__,
            **self.progress,
            "files": {name: {"size": r.size, "crc32": f"{r.crc32:08x}"} for name, r in self.files.items()},
            "entries": table.to_json(self.table),
        }
        text = json.dumps(content).encode().removesuffix(b"}")
        with writing(folder / MANIFEST) as stream:
            stream.write(text + CHECKSUM + f'"{zlib.crc32(text):08x}"}}'.encode())

    def check(self, folder: Path, *, verify: bool) -> None:
        """Check the files of the folder, each on one rank; all ranks raise if one file is not as it was saved.

        The ranks that wrote a folder check what they wrote and, most often, read next.
        """
        rank, ranks = rank_and_ranks()
        own = list(self.files.items())[rank::ranks]

        def check_own() -> None:
            for name, record in own:
                check_file(folder / name, record, self.save, verify=verify)

        on_all_ranks(check_own)


def read(folder: Path, *, verify: bool) -> Manifest | None:
    """Return the manifest of a folder; None for a folder that this package did not write, or not by this version.

    Raises:
        FileNotFoundError: the shards are of this package, and the manifest is missing (``verify``).
        ValueError: the manifest is damaged, or is of a later version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        _check_foreign(folder, verify)
        return None
    try:
        content = path.read_bytes()
        stored = json.loads(content)
        if stored["crc32"] != f"{zlib.crc32(content[: content.rfind(CHECKSUM)]):08x}":
            raise ValueError("its checksum (CRC-32) differs")
        if stored["format"] == FORMAT:
            return _of_json(stored)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}. Load another checkpoint.") from error
    raise ValueError(
        f"{str(path)!r} has the format {stored['format']!r}, and this version of lightning_lowprec reads {FORMAT}."
        " Install a later version."
    )


def _of_json(stored: Mapping[str, Any]) -> Manifest:
    files = {name: FileRecord(r["size"], int(r["crc32"], 16)) for name, r in stored["files"].items()}
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"the file {name!r} is not in the folder")
    progress = {name: stored[name] for name in PROGRESS if name in stored}
    return Manifest(save=stored["save"], files=files, table=table.from_json(stored["entries"]), progress=progress)


def _check_foreign(folder: Path, verify: bool) -> None:
    """Raise if the shards of a folder without a manifest are of this package."""
    shards = sorted(folder.glob(f"*{SHARD}")) if verify else []
    if shards and save_of(shards[0]) is not None:
        raise FileNotFoundError(
            f"{str(folder / MANIFEST)!r} is missing, and the shards of the folder were written with it. Copy the whole"
            " folder; `verify_checkpoints=False` of the strategy reads the folder without its manifest."
        )
