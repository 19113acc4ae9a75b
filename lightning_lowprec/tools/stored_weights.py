"""Read the weights of a checkpoint of torch, Trainer, Fabric or safetensors; errors name the path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from lightning_lowprec.extras import require
from lightning_lowprec.fsdp2 import torch_file

WEIGHT_KEYS: Final = ("state_dict", "model")
"""The keys under which the Trainer and, by convention, Fabric users save the weights."""
FILE_ENDINGS: Final = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")


def check_file(field: str, path: Path) -> None:
    """Raise a ValueError if there is no such file, with another remedy for the folder of a sharded checkpoint."""
    if path.is_dir():
        raise ValueError(
            f"`{field}={str(path)!r}` is a folder; expected a file. Load a sharded checkpoint with `strategy='fsdp2'`,"
            " and save it as one file with `FSDP2Strategy(state_dict_type='full')`."
        )
    if not path.is_file():
        raise ValueError(f"`{field}={str(path)!r}` is not a file; expected a checkpoint.")


def load(path: Path, *, device: str, check: bool = False) -> Any:
    """Return the content of a checkpoint file: its tensors on ``device``; ``check`` compares checksums.

    Raises:
        ValueError: the file is no checkpoint, or is damaged.
        pickle.UnpicklingError: the file holds objects whose reading can run code.
    """
    if path.suffix != ".safetensors":
        if check:
            torch_file.check_records(path)
        return torch_file.read(path, None, map_location=device)
    try:
        return require("safetensors.torch", "a safetensors checkpoint").load_file(path)
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise unreadable(path, error) from error


def unreadable(path: Path, error: BaseException) -> ValueError:
    """Return the error for a file of safetensors that cannot be read."""
    return ValueError(f"{str(path)!r} is no file of safetensors, or is damaged ({error}).")


def find_weights(content: Any, key: str | None = None) -> dict[str, Tensor]:
    """Return the tensors under ``key`` in a loaded checkpoint; None means ``state_dict``, ``model``, or the top."""
    found = content
    if isinstance(content, Mapping):
        top = next((content[name] for name in WEIGHT_KEYS if isinstance(content.get(name), Mapping)), content)
        found = top if key is None else content.get(key)
    if not isinstance(found, Mapping):
        return {}
    return {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)}
