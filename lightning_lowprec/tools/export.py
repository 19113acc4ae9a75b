"""``lowprec export``: a plain checkpoint, with weights only; with ``--format`` a folder for servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_lowprec import names as precisions
from lightning_lowprec.checkpoints.weights import check_file, open_weights
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.extras import require
from lightning_lowprec.serving.choice import NOTHING, WITHOUT_FP8, RoundedWeights, of_plan
from lightning_lowprec.serving.export import DTYPES, Exported, Options, report, served_model, write
from lightning_lowprec.serving.formats import DtypeName, find_format
from lightning_lowprec.serving.safetensors_files import check_out
from lightning_lowprec.serving.sources import LiveModel, WithoutAdapter
from lightning_lowprec.tools import strict_json
from lightning_lowprec.tools.export_check import Bounds, Result, check, refuse_unchecked
from lightning_lowprec.tools.export_source import Renamed, backend_of, read_config
from lightning_lowprec.tools.planning.source import load
from lightning_lowprec.tools.terminal import prints_to_stderr, working


def run(args: Any) -> int:
    """Write the file and print how much the file holds; with ``--format`` write a folder for servers."""
    if hasattr(args, "format"):
        return _export_folder(args)
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


# ---- a folder for servers


def _export_folder(args: Any) -> int:
    """Write the folder, print what was written, and with ``--check`` compare; return 1 if a bound is not held."""
    out, bounds, options = Path(args.out), _bounds(args), _options(args)
    check_out(out)
    with prints_to_stderr(wanted=args.json):
        with working(f"reading {args.checkpoint}"):
            model = served_model(load(args.model, {}).model)
            model.tie_weights()
            stored = open_weights(Path(args.checkpoint), args.key)
            known = {*model.state_dict(), *(name for name, _ in model.named_buffers())}
            source = Renamed(stored, LiveModel(model).shapes, known, args.strip_prefix)
            adapter = None if args.adapter_config is None else read_config(Path(args.adapter_config))
        if args.check:
            refuse_unchecked(model, args.format)
        has_codes = find_format(args.format).scale_per is not None
        choice = _choice(args, model, backend_of(stored.content)) if has_codes else NOTHING
        done = write(source, model, choice, out, options, adapter)
        if not args.json:
            print(done.text())
            if source.left_out:
                print(f"{source.left_out} tensors of the checkpoint belong to other modules, and were left out")
        result = None
        if args.check:
            adapted = WithoutAdapter(source, adapter, merge=args.merge_adapters)
            with working("checking") as shown:
                result = check(model, adapted, out, bounds, say=shown.say)
    if args.json:
        print(strict_json.dumps(_as_json(options, done, source.left_out, result)))
    elif result is not None:
        print(result.text())
    return 0 if result is None or result.holds else 1


def _as_json(options: Options, done: Exported, left_out: int, result: Result | None) -> dict[str, Any]:
    return {
        "out": str(done.out),
        "bytes": done.size,
        "tensors_written": done.tensors,
        "tensors_left_out": left_out,
        "adapter_layers": done.adapter_layers,
        **report(options, done),
        "check": None if result is None else result.as_json(),
    }


def _options(args: Any) -> Options:
    return Options(
        format=args.format,
        dtype=args.dtype,
        weights_only=args.weights_only,
        merge_adapters=args.merge_adapters,
        files_from=_files_from(args),
    )


def _files_from(args: Any) -> Path | None:
    """Return the folder of the tokenizer: the one that is named, or that of ``--model``."""
    if args.tokenizer is not None:
        return Path(args.tokenizer)
    model = Path(args.model)
    return model if model.is_dir() else model.parent if model.is_file() else None


def _choice(args: Any, model: Any, trained_by: str | None) -> RoundedWeights:
    """Return which weights become codes: the plan of the precision, with the options that the run had."""
    name = args.precision
    row = precisions.resolve(name) if name in precisions.TABLE else None
    backend = None if row is None else row.backend
    if trained_by is not None and backend != trained_by:
        raise _of_another_backend(name, trained_by)
    in_fp8 = row is not None and backend is not None
    if row is None or not in_fp8:
        row = precisions.resolve(WITHOUT_FP8)
    plan = make_plan(model, args.layers, replace(row.plan_request(), pads=None))
    if not plan.converted:
        raise ValueError(f"the plan of {name or WITHOUT_FP8!r} converts no layer:\n{plan}\nUse `--format hf`.")
    return of_plan(plan, row.weight_rounding() if in_fp8 else None)


def _of_another_backend(name: str | None, trained_by: str) -> ValueError:
    """Return the error for a precision that is not of the backend that the checkpoint names."""
    expected = ", ".join(backends.get(trained_by).names)
    if name is None:
        return ValueError(
            f"the checkpoint was trained by {trained_by}, and does not say by which recipe. Name the precision of the"
            f" run with `--precision`, so that the codes are those of the last step; one of: {expected}."
        )
    return ValueError(
        f"`precision={name!r}` is not valid: the checkpoint was trained by {trained_by}. Expected one of: {expected}."
    )


def _bounds(args: Any) -> Bounds:
    return Bounds(
        min_snr=args.min_snr,
        min_agreement=args.min_agreement,
        max_perplexity=args.max_perplexity,
        text=None if args.check_text is None else Path(args.check_text),
    )
