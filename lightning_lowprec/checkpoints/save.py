"""Save a sharded model and its optimizers: a file of whole tensors on rank 0, or a folder of every rank's shards.

Both hold a model under the names and in the dtypes of its state dict, and optimizer state by the name (or position) of
the parameter. A folder has the shards, torch's table of contents, everything else in ``meta.pt``, and the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final
from uuid import uuid4

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from typing_extensions import override

from lightning_lowprec.checkpoints import atomic, torch_file
from lightning_lowprec.checkpoints.agreement import gathered, on_rank_zero, rank_and_ranks
from lightning_lowprec.checkpoints.checked_file import FileRecord, writing
from lightning_lowprec.checkpoints.manifest import META, SAVE, SHARD, Manifest, header


def model_state(model: nn.Module, *, full: bool) -> dict[str, Any]:
    """Return a model's state dict: whole tensors on rank 0 and nothing elsewhere, or DTensors on every rank."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=full, cpu_offload=True))


def save(path: Path, shards: Mapping[str, Any], rest: Mapping[str, Any], *, full: bool) -> None:
    """Write ``shards`` (models and optimizers by key) and ``rest``: a file on rank 0, or a folder on all ranks."""
    with atomic.replacing(path, folder=not full) as new:
        if not full:
            _write_folder(new, shards, rest)
        elif torch.distributed.get_rank() == 0:
            torch_file.write({**shards, **rest}, new, checked=False)  # torch writes checksums of its own


def check_storage_options(value: Any) -> None:
    """Raise TypeError if the user gave storage options."""
    if value is not None:
        raise TypeError(
            f"`storage_options={value!r}` is not valid with 'fsdp2', which writes checkpoints by itself and not through"
            " a CheckpointIO; leave it out."
        )


def _write_folder(folder: Path, shards: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    identity = on_rank_zero(lambda: uuid4().hex)
    files = _Files(identity)
    save_shards(dict(shards), storage_writer=_Writer(folder, files))
    records = gathered(files.records)
    if rank_and_ranks()[0] > 0:
        return
    _check_shared(folder, records)
    written = {name: record for of_rank in records for name, record in of_rank.items()}
    written[META] = torch_file.write({**rest, SAVE: identity}, folder / META)
    Manifest(save=identity, files=written).write(folder, rest)


@final
class _Files(FileSystem):
    """Files for writing: shard files get a header, and ``records`` keeps the sizes and checksums of all files."""

    def __init__(self, save: str) -> None:
        self.save = save
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file; torch renames the table of contents, which is written as ``.metadata.tmp``."""
        with writing(Path(path)) as checked:
            if Path(path).suffix == SHARD:
                checked.write(header(self.save))
            yield checked
        self.records[Path(path).name.removesuffix(".tmp")] = checked.record


@final
class _Writer(FileSystemWriter):
    """Writes shards and, on rank 0, the table of contents, which names the save."""

    def __init__(self, folder: Path, files: _Files) -> None:
        super().__init__(folder)
        self.fs = self._files = files

    @override
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self._files.save)


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
