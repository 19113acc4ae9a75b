"""``lowprec export``: make a plain checkpoint, with weights only, from a checkpoint of any precision."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from lightning_lowprec.extras import require
from lightning_lowprec.fsdp2 import torch_file

DtypeName = Literal["keep", "fp32", "bf16", "fp16"]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_KEYS = ("state_dict", "model")
"""The keys under which the Trainer and, by convention, Fabric users save the weights."""


def run(argv: Sequence[str]) -> int:
    """Write the file and print how much the file holds."""
    parser = ArgumentParser(
        prog="lowprec export", description="Write only the weights of a checkpoint to a plain file."
    )
    parser.add_function_arguments(export, as_group=False, as_positional=True)
    args = parser.parse_args(argv)
    weights = export(**vars(args))
    size = sum(value.numel() * value.element_size() for value in weights.values())
    print(f"wrote {len(weights)} tensors, {size / 1e6:.1f} MB, to {args.out}")
    return 0


def export(
    checkpoint: Path, out: Path, *, dtype: DtypeName = "keep", key: str | None = None, strip_prefix: str = ""
) -> dict[str, Tensor]:
    """Write only the weights of a checkpoint to a plain file, and return them.

    Args:
        checkpoint: a file of the Trainer, of ``fabric.save`` or of ``torch.save``, or a safetensors file.
        out: the new file: safetensors if it ends in ``.safetensors``, else for ``torch.load``. It is never half
            written.
        dtype: the dtype of floating-point weights; ``"keep"`` leaves them.
        key: the key of the weights in the checkpoint; None looks under ``state_dict``, ``model``, then at the top.
        strip_prefix: removed from every name, e.g. ``"model."`` for a model inside a LightningModule.

    Raises:
        ValueError: there is no such file, the file is damaged, the checkpoint has no weights under the key, or a name
            has no such prefix.
        pickle.UnpicklingError: the checkpoint holds objects whose reading can run code.
    """
    if not checkpoint.is_file():
        raise ValueError(f"`checkpoint={str(checkpoint)!r}` is not a file; expected a checkpoint (no sharded folder).")
    weights = _read(checkpoint, key)
    outside = [name for name in weights if not name.startswith(strip_prefix)]
    if outside:
        raise ValueError(
            f"`strip_prefix={strip_prefix!r}` is not at the start of {outside[0]!r} (and {len(outside) - 1} more);"
            " expected a prefix that every weight has."
        )
    weights = {name.removeprefix(strip_prefix): value for name, value in weights.items()}
    if dtype != "keep":
        weights = {n: v.to(DTYPES[dtype]) if v.is_floating_point() else v for n, v in weights.items()}
    aside = out.with_name(f".{out.name}.partial")
    if out.suffix == ".safetensors":
        separate = {name: value.clone() for name, value in weights.items()}  # safetensors refuses tied tensors
        require("safetensors.torch", "a safetensors file").save_file(separate, aside, metadata={"format": "pt"})
    else:
        torch.save(weights, aside)
    os.replace(aside, out)
    return weights


def _read(checkpoint: Path, key: str | None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, on CPU."""
    if checkpoint.suffix == ".safetensors":
        loaded: dict[str, Tensor] = require("safetensors.torch", "a safetensors checkpoint").load_file(checkpoint)
        return loaded
    torch_file.check_records(checkpoint)
    content = torch_file.read(checkpoint, None)
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
    found = content
    if isinstance(content, dict):
        top = next((content[name] for name in WEIGHT_KEYS if isinstance(content.get(name), dict)), content)
        found = top if key is None else content.get(key)
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)}
