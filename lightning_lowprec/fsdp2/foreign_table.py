"""Read the table of contents of a folder that this package did not write, without running its code.

Lightning's strategies and torch.distributed.checkpoint store the table as a pickle, ``.metadata``. A pickle names the
functions and classes that are called to build its objects, so a pickle can run any code. The reader here knows the
classes of torch's table by name, and takes a plain record in place of each of them: no function or class of another
library is called or changed. Any other name raises.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Final, final

import torch

from lightning_lowprec.fsdp2 import table
from lightning_lowprec.fsdp2.torch_file import remedy, runs_code

TABLE: Final = ".metadata"
_DCP: Final = "torch.distributed.checkpoint"
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
RECORDS: Final = frozenset(
    {
        (f"{_DCP}.metadata", "Metadata"),
        (f"{_DCP}.metadata", "MetadataIndex"),
        (f"{_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        (_SHARDED, "TensorProperties"),  # of torch before 2.3
        (_SHARDED, "MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
        ("pathlib._local", "WindowsPath"),
        ("builtins", "getattr"),  # the members of an Enum, in some versions of Python
    }
)
"""The classes and functions of a table, of which a record is made. None of them is called."""
VALUES: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
}


def read(folder: Path, weights_only: bool | None) -> table.Table:
    """Return the table of contents of a folder that has no manifest.

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
            found = _Reader(file, runs_code(weights_only)).load()
        except _Refused as error:
            raise pickle.UnpicklingError(
                f"{str(path)!r} names {error}, which no table of torch.distributed.checkpoint has; to read such a"
                f" table can run code. {remedy(weights_only)}"
            ) from None
        except Exception as error:
            raise _damaged(path, error) from error
    try:
        return _of_record(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


@final
class _Refused(Exception):
    """A name that a table does not have."""


def _record_class() -> type:
    """Return a class that stands for one class of one pickle: a pickle may change the attributes of its classes."""

    @final
    class Record:
        """An object of the pickle: no more than its state."""

        state: Any = None

        def __init__(self, *args: Any) -> None:
            """Take the arguments of any class."""

        def __setstate__(self, state: Any) -> None:
            self.state = state

    return Record


@final
class _Reader(pickle.Unpickler):
    """Builds records and plain values; other objects only if the user trusts the pickle."""

    def __init__(self, file: IO[bytes], trusted: bool) -> None:
        super().__init__(file)
        self._trusted = trusted

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a class or function of the pickle."""
        if (module, name) in RECORDS:
            return _record_class()
        if (module, name) in VALUES:
            return VALUES[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if self._trusted:
            return super().find_class(module, name)
        raise _Refused(f"{module}.{name}")


def _of_record(found: Any) -> table.Table:
    """Build a table from the record of a ``Metadata``."""
    fields = _fields(found)
    paths = fields.get("planner_data")
    if not isinstance(paths, dict):
        raise ValueError("the plan that wrote the folder does not say how entries are nested")
    places = {}
    for index, info in fields["storage_data"].items():
        key, where = _fields(index), _fields(info)
        if where.get("transform_descriptors"):
            raise ValueError("its tensors are compressed")
        offset = key.get("offset")
        name = (key["fqn"], None if offset is None else tuple(offset))
        places[name] = table.place(where["relative_path"], where["offset"], where["length"])
    return {
        name: table.Entry(table.path(paths.get(name, (name,))), _content(name, _fields(stored), places))
        for name, stored in fields["state_dict_metadata"].items()
    }


def _content(
    name: str, stored: Mapping[str, Any], places: Mapping[Any, table.Place]
) -> table.StoredTensor | table.Place:
    if "chunks" not in stored:
        return places[name, None]
    chunks = [(table.sizes(c["offsets"]), table.sizes(c["sizes"])) for c in map(_fields, stored["chunks"])]
    pieces = [table.Piece(offsets, sizes, places[name, offsets]) for offsets, sizes in chunks]
    properties = stored["properties"].state  # a tuple that begins with the dtype
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    return table.tensor(dtype, stored["size"], pieces)


def _fields(record: Any) -> Mapping[str, Any]:
    """Return the fields of an object; an object without state has none."""
    state = getattr(record, "state", record)
    if state is None:
        return {}
    if not isinstance(state, dict):
        raise TypeError(f"{type(record).__name__} is no object of a table")
    return state


def _damaged(path: Path, error: Exception) -> ValueError:
    reason = str(error) or type(error).__name__
    return ValueError(f"{str(path)!r} is damaged, or is no table of contents: {reason}. Load another checkpoint.")
