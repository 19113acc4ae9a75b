"""Read sharded checkpoints: folders in the format of torch.distributed.checkpoint, by their table of contents.

torch fills tensors that it is given, so a reader must know beforehand what is stored. The table of contents says this:
the state that an optimizer has, its dtypes, and how it is nested, for checkpoints of this package and of Lightning's
ModelParallelStrategy and FSDPStrategy. State is read into tensors that are sharded like the parameter of that name.

``.metadata`` is a pickle of torch: read only checkpoints that you trust. Everything else is read with
``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_lowprec.fsdp2 import torchao_optimizers
from lightning_lowprec.fsdp2.optimizer_state import clean, unpacked
from lightning_lowprec.fsdp2.placement import empty

Path_ = tuple[str | int, ...]


class ShardedCheckpoint:
    """The table of contents of a sharded checkpoint.

    Raises:
        ValueError: the checkpoint does not say how its entries are nested.
    """

    def __init__(self, path: Path) -> None:
        self._reader = FileSystemReader(path)
        metadata = self._reader.read_metadata()
        paths = metadata.planner_data
        if not isinstance(paths, dict):
            raise ValueError(f"{str(path)!r} was not written by a plan that says how its entries are nested.")
        self._stored: dict[str, Any] = dict(metadata.state_dict_metadata)
        self._path_of: dict[str, Path_] = {key: tuple(paths.get(key, (key,))) for key in self._stored}

    @property
    def roots(self) -> list[str]:
        """Return the keys under which models and optimizers are stored."""
        return sorted({str(path[0]) for path in self._path_of.values()})

    def model(self, root: str, live: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a model, sharded like the entries of ``live``.

        Args:
            root: the model's key.
            live: the model's state dict, without copies. Its tensors are filled in place if the dtype is the same.
                Stored entries that it lacks are not read, and are returned as None.

        Raises:
            ValueError: a stored tensor has another shape.
        """
        names = {key: clean(".".join(map(str, path[1:]))) for key, path in self._path_of.items() if path[0] == root}
        values = self._read({key: self._template(key, live[name]) for key, name in names.items() if name in live})
        return {name: values.get(key) for key, name in names.items()}

    def _template(self, key: str, like: Any) -> Any:
        stored = self._stored[key]
        if not isinstance(stored, TensorStorageMetadata):
            return 0
        dtype = stored.properties.dtype
        if not isinstance(like, Tensor):
            return 0
        if like.shape != stored.size:
            raise ValueError(
                f"{key!r} has the shape {tuple(stored.size)} in the checkpoint and {tuple(like.shape)} in the model."
            )
        return like if like.dtype == dtype else torch.empty_like(like, dtype=dtype)

    def optimizer(self, root: str, params: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return an optimizer's nested state dict by fqn, without the state of parameters that ``params`` lacks."""
        wanted: dict[str, Any] = {}
        for key, path in self._path_of.items():
            if path[0] != root:
                continue
            if path[1] == "state":
                fqn = clean(str(path[2]))
                if fqn in params:
                    wanted[key] = self._state_template(key, path, params[fqn])
            else:
                stored = self._stored[key]
                is_tensor = isinstance(stored, TensorStorageMetadata)
                wanted[key] = torch.empty(stored.size, dtype=stored.properties.dtype) if is_tensor else 0
        nested = _nested({self._path_of[key][1:]: value for key, value in self._read(wanted).items()})
        state = {clean(fqn): entry for fqn, entry in nested.get("state", {}).items()}
        state = {
            fqn: {name: unpacked(value, params[fqn]) for name, value in entry.items()} for fqn, entry in state.items()
        }
        return {"state": state, "param_groups": nested["param_groups"]}

    def _state_template(self, key: str, path: Path_, like: Tensor) -> Any:
        stored = self._stored[key]
        if not isinstance(stored, TensorStorageMetadata):
            return 0
        dtype = stored.properties.dtype
        prefix = ".".join(map(str, path[:-1]))
        if f"{prefix}.{torchao_optimizers.CLASS}" not in self._stored:
            return empty(stored.size, dtype, like)
        block_size = like.numel() // self._stored[f"{prefix}.scale"].size.numel()
        if path[-1] == "qmap" or not torchao_optimizers.keeps_blocks(block_size, like):
            return torch.empty(stored.size, dtype=dtype)
        return torchao_optimizers.empty_rows(stored.size, dtype, like)

    def _read(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted:
            load(wanted, storage_reader=self._reader, planner=_Planner())
        return wanted


class _Planner(DefaultLoadPlanner):
    """A planner that reads flat keys, and nothing that needs pickle."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _nested(items: Mapping[Path_, Any]) -> Any:
    """Nest values by path, as dicts, or as lists where the path has numbers."""
    if () in items:
        return items[()]
    inner: dict[str | int, dict[Path_, Any]] = {}
    for (first, *rest), value in items.items():
        inner.setdefault(first, {})[tuple(rest)] = value
    values = {key: _nested(sub) for key, sub in inner.items()}
    if values and all(isinstance(key, int) for key in values):
        return [values[key] for key in sorted(values)]
    return values
