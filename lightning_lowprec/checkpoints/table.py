"""Read the table of contents of a folder of shards, torch's own :class:`Metadata`, without running code.

torch.distributed.checkpoint stores the table as a pickle, ``.metadata``: which tensors and values the folder holds, in
pieces, where the pieces lie, and how the saved state was nested. A pickle names the functions and classes that build
its objects, so a pickle can run any code. The reader here admits the names of torch's tables and no other name. The
pickle never sees torch's classes but classes of one pickle, which build torch's objects: a pickle can change the
attributes of the classes that it sees.
"""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_lowprec.checkpoints.torch_file import remedy, runs_code

TABLE: Final = ".metadata"
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_ENCODING: Final = "_MEM_FORMAT_ENCODING"
NAMES: Final = frozenset(
    {
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "StorageMeta"),
        (_METADATA, _ENCODING),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        (_SHARDED, "TensorProperties"),  # of torch before 2.3
        (_SHARDED, "MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
    }
)
"""The classes and functions of a table, beside dtypes, paths and the members of an Enum."""


def read(folder: Path, weights_only: bool | None) -> Metadata:
    """Return the table of contents of a folder.

    Raises:
        FileNotFoundError: the folder has no ``.metadata``.
        ValueError: the table is damaged, or is no table.
        pickle.UnpicklingError: the table names other classes than those of torch's tables, and ``weights_only`` does
            not allow to run code.
    """
    path = folder / TABLE
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is missing: without it the folder cannot be read.")
    with path.open("rb") as file:
        try:
            return _checked(_Reader(file, runs_code(weights_only)).load())
        except _Refused as error:
            raise pickle.UnpicklingError(
                f"{str(path)!r} names {error}, which no table of torch.distributed.checkpoint has; to read such a"
                f" table can run code. {remedy(weights_only)}"
            ) from None
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise ValueError(
                f"{str(path)!r} is damaged, or is no table of contents: {reason}. Load another checkpoint."
            ) from error


def place(table: Metadata, name: str, offsets: Sequence[int] | None = None) -> Any:
    """Return file, offset and length of a value, or of the piece of a tensor that begins at ``offsets``."""
    assert table.storage_data is not None
    return table.storage_data[MetadataIndex(name, offsets)]


def save_of(table: Metadata) -> str | None:
    """Return the identity of the save that wrote the table."""
    return getattr(table.storage_meta, "save_id", None)


@final
class _Refused(Exception):
    """A name that a table does not have."""


@final
class _Reader(pickle.Unpickler):
    """Builds the objects of a table; other objects only if the user trusts the pickle."""

    def __init__(self, file: IO[bytes], trusted: bool) -> None:
        super().__init__(file)
        self._trusted = trusted

    def find_class(self, module: str, name: str) -> Any:
        """Return a dtype, or a class that stands for a class or function of the pickle."""
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) in NAMES:
            return _stand_in(super().find_class(module, name))
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return _stand_in(vars(pathlib)[f"Pure{name}"])
        if (module, name) == ("builtins", "getattr"):  # the members of an Enum, in some versions of Python
            return _stand_in(lambda _, member: super(_Reader, self).find_class(_METADATA, _ENCODING)[member])
        if self._trusted:
            return super().find_class(module, name)
        raise _Refused(f"{module}.{name}")


def _stand_in(build: Any) -> type:
    """Return a class of one pickle whose instances are what ``build`` returns."""

    def new(_: type, *args: Any) -> Any:
        return build(*args) if args else build.__new__(build)

    return type("StandIn", (), {"__new__": new})


def _checked(table: Any) -> Metadata:
    """Return a table whose files lie in its folder and whose pieces have a place; its entries know their keys."""
    keys = table.planner_data
    if not isinstance(table, Metadata) or not isinstance(keys, dict):
        raise ValueError("the plan that wrote the folder does not say how entries are nested")
    table.planner_data = {name: tuple(keys.get(name, (name,))) for name in table.state_dict_metadata}
    for info in (table.storage_data or {}).values():
        file = PurePosixPath(info.relative_path)
        if not file.name or file.is_absolute() or ".." in file.parts or "\\" in info.relative_path:
            raise ValueError(f"the file {info.relative_path!r} is not in the folder")
        if info.transform_descriptors:
            raise ValueError("its tensors are compressed")
    for name, stored in table.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            place(table, name)
            continue
        if not isinstance(stored.properties.dtype, torch.dtype):
            raise ValueError(f"{stored.properties.dtype!r} is no dtype")
        for chunk in stored.chunks:
            place(table, name, chunk.offsets)
            if not len(chunk.offsets) == len(chunk.sizes) == len(stored.size):
                raise ValueError(f"the pieces of a tensor of shape {tuple(stored.size)} have other dimensions")
    return table
