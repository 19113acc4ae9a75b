"""Make a plain checkpoint, with weights only, from a checkpoint of any precision."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_lowprec.extras import require

DtypeName = Literal["keep", "fp32", "bf16", "fp16"]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_KEYS = ("state_dict", "model")
"""The keys under which the Trainer and, by convention, Fabric users save the weights."""


def export(
    checkpoint: Path, out: Path, *, dtype: DtypeName = "keep", key: str | None = None, strip_prefix: str = ""
) -> dict[str, Tensor]:
    """Write the weights of ``checkpoint`` to ``out`` and return them.

    Args:
        checkpoint: a file of the Trainer, of ``fabric.save`` or of ``torch.save``, or a safetensors file.
        out: the new file: safetensors if it ends in ``.safetensors``, else for ``torch.load``. It is never half
            written.
        dtype: the dtype of floating-point weights; ``"keep"`` leaves them.
        key: the key of the weights in the checkpoint; None looks under ``state_dict``, ``model``, then at the top.
        strip_prefix: removed from every name, e.g. ``"model."`` for a model inside a LightningModule.

    Raises:
        ValueError: the checkpoint has no weights under the key, or a name has no such prefix.
    """
    weights = _named(read_weights(checkpoint, key), strip_prefix)
    if dtype != "keep":
        weights = {name: _cast(value, DTYPES[dtype]) for name, value in weights.items()}
    aside = out.with_name(f".{out.name}.partial")
    _write(weights, aside, safetensors=out.suffix == ".safetensors")
    os.replace(aside, out)
    return weights


def read_weights(checkpoint: Path, key: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, on CPU."""
    if checkpoint.suffix == ".safetensors":
        loaded: dict[str, Tensor] = require("safetensors.torch", "a safetensors checkpoint").load_file(checkpoint)
        return loaded
    content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    weights = find_weights(content, key)
    if not weights:
        keys = ", ".join(map(repr, content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"{str(checkpoint)!r} holds no weights under {key or ' or '.join(WEIGHT_KEYS)!r}; it has: {keys}. Name the"
            " right one with `--key`."
        )
    return weights


def find_weights(content: Any, key: str | None = None) -> dict[str, Tensor]:
    """Return the tensors under ``key`` in a loaded checkpoint; None means ``state_dict``, ``model``, or the top."""
    if not isinstance(content, dict):
        return {}
    if key is not None:
        found = content.get(key)
    else:
        found = next((content[name] for name in WEIGHT_KEYS if isinstance(content.get(name), dict)), content)
    return (
        {name: value for name, value in found.items() if isinstance(value, Tensor)} if isinstance(found, dict) else {}
    )


def _named(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    outside = [name for name in weights if not name.startswith(prefix)]
    if outside:
        raise ValueError(
            f"`strip_prefix={prefix!r}` is not at the start of {outside[0]!r} (and {len(outside) - 1} more); expected a"
            " prefix that every weight has."
        )
    return {name.removeprefix(prefix): value for name, value in weights.items()}


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _write(weights: dict[str, Tensor], path: Path, *, safetensors: bool) -> None:
    if not safetensors:
        torch.save(weights, path)
        return
    seen: set[int] = set()
    separate = {}
    for name, value in weights.items():  # safetensors refuses tied tensors: each is stored separately
        shared = value.untyped_storage().data_ptr() in seen
        seen.add(value.untyped_storage().data_ptr())
        separate[name] = value.clone() if shared else value.contiguous()
    require("safetensors.torch", "a safetensors file").save_file(separate, path, metadata={"format": "pt"})
