"""Write a folder of shards: the shards of every rank, everything else in ``meta.pt``, and the manifest."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final
from uuid import uuid4

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning_lowprec.fsdp2 import torch_file
from lightning_lowprec.fsdp2.agreement import gathered, on_rank_zero, rank_and_ranks
from lightning_lowprec.fsdp2.checked_file import FileRecord
from lightning_lowprec.fsdp2.manifest import META, PROGRESS, SAVE, Manifest
from lightning_lowprec.fsdp2.shard_files import WrittenShards
from lightning_lowprec.fsdp2.table import Table, table_of


def write(folder: Path, shards: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Write ``shards`` (models and optimizers by key) and ``rest`` into an empty folder; called on all ranks."""
    identity = on_rank_zero(lambda: uuid4().hex)
    writer = _Writer(folder, identity)
    save(dict(shards), storage_writer=writer)
    records = gathered(writer.shards.records)
    if rank_and_ranks()[0] > 0:
        return
    _check_shared(folder, records)
    files = {name: record for of_rank in records for name, record in of_rank.items()}
    files[META] = torch_file.write({**rest, SAVE: identity}, folder / META)
    progress = {name: rest[name] for name in PROGRESS if type(rest.get(name)) is int}
    Manifest(save=identity, files=files, table=writer.table, progress=progress).write(folder)


@final
class _Writer(FileSystemWriter):
    """Writes shards whose files name their save, and keeps the table of contents, on rank 0."""

    def __init__(self, folder: Path, save: str) -> None:
        super().__init__(folder)
        self.fs = self.shards = WrittenShards(save)
        self.table: Table = {}

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.table = table_of(metadata, itertools.chain.from_iterable(results))


def _check_shared(folder: Path, records: list[dict[str, FileRecord]]) -> None:
    """Raise if rank 0 does not see what the other ranks wrote."""
    for rank, of_rank in enumerate(records):
        for name, record in of_rank.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != record.size:
                raise OSError(
                    f"rank 0 does not see the file {name!r} that rank {rank} wrote: the folder of a sharded checkpoint"
                    " must lie on a file system that all ranks share"
                )
