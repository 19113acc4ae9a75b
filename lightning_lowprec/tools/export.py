"""``lowprec export``: a plain checkpoint, with weights only; with ``--format`` a folder, by ``serving/``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_lowprec.checkpoints.weights import check_file, open_weights
from lightning_lowprec.extras import require
from lightning_lowprec.serving.export import DTYPES
from lightning_lowprec.serving.formats import DtypeName
from lightning_lowprec.tools import strict_json
from lightning_lowprec.tools.terminal import working


def run(args: Any) -> int:
    """Write the file and print how much the file holds; with ``--format`` write a folder for servers."""
    if hasattr(args, "format"):
        from lightning_lowprec.tools.serving import command

        return command.run(args)
    with working(f"exporting {args.checkpoint}"):
        weights = export(
            args.checkpoint,
            args.out,
            dtype=args.dtype,
            key=args.key,
            strip_prefix=args.strip_prefix,
            force=args.force,
        )
    size = sum(value.numel() * value.element_size() for value in weights.values())
    if args.json:
        print(strict_json.dumps({"out": str(args.out), "bytes": size, "tensors": _described(weights)}))
        return 0
    print(f"wrote {len(weights)} tensors, {size / 1e6:.1f} MB, to {args.out}")
    return 0


def _described(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    return {n: {"shape": list(v.shape), "dtype": str(v.dtype).removeprefix("torch.")} for n, v in weights.items()}


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: DtypeName | Literal["keep"] = "keep",
    key: str | None = None,
    strip_prefix: str = "",
    force: bool = False,
) -> dict[str, Tensor]:
    """Write only the weights of a checkpoint to a plain file, and return them.

    Args:
        checkpoint: a file of the Trainer, of ``fabric.save`` or of ``torch.save``, or a safetensors file.
        out: the new file: safetensors if it ends in ``.safetensors``, else for ``torch.load``. It is never half
            written.
        dtype: the dtype of floating-point weights; ``"keep"`` leaves them.
        key: the key of the weights in the checkpoint; None looks under ``state_dict``, ``model``, then at the top.
        strip_prefix: removed from every name, e.g. ``"model."`` for a model inside a LightningModule.
        force: replace ``out`` if the file exists; the checkpoint itself is never replaced.

    Raises:
        ValueError: there is no such file, the file cannot be read, the checkpoint has no weights under the key, a name
            has no such prefix, or ``out`` exists.
        OSError: ``out`` cannot be written.
        pickle.UnpicklingError: the checkpoint holds objects whose reading can run code.
    """
    check_file("checkpoint", checkpoint)
    _check_out(checkpoint, out, force=force)
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
    _write(weights, out)
    return weights


def _check_out(checkpoint: Path, out: Path, *, force: bool) -> None:
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"`out={str(out)!r}` is not valid; expected a file in a folder that exists.")
    if out.exists() and out.samefile(checkpoint):
        raise ValueError(f"`out={str(out)!r}` is the checkpoint itself, which would be lost; expected another file.")
    if out.exists() and not force:
        raise ValueError(f"`out={str(out)!r}` exists; expected a new file. `--force` replaces the file.")


def _write(weights: dict[str, Tensor], out: Path) -> None:
    """Write beside ``out`` and rename, so that ``out`` is never half written."""
    aside = out.with_name(f".{out.name}.partial")
    try:
        if out.suffix == ".safetensors":
            separate = {name: value.clone() for name, value in weights.items()}  # safetensors refuses tied tensors
            require("safetensors.torch", "a safetensors file").save_file(separate, aside, metadata={"format": "pt"})
        else:
            torch.save(weights, aside)
        os.replace(aside, out)
    except Exception as error:
        with suppress(OSError):
            aside.unlink()
        if isinstance(error, ImportError):
            raise
        raise OSError(f"{str(out)!r} was not written ({type(error).__name__}: {error})") from error


def _read(checkpoint: Path, key: str | None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, on CPU."""
    source = open_weights(checkpoint, key)
    sizes = {name: shape.size for name, shape in source.shapes.items()}
    return {name: source.rows(name, 0, size[0] if size else 1).reshape(size) for name, size in sizes.items()}
