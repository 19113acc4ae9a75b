"""``lowprec export CHECKPOINT OUT --format FORMAT``: a checkpoint of a training run to a folder that servers load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from lightning_lowprec import names as precisions
from lightning_lowprec.checkpoints.weights import Source, open_weights
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.names import validate_name
from lightning_lowprec.serving.choice import NOTHING, WITHOUT_FP8, RoundedWeights, of_plan
from lightning_lowprec.serving.export import Exported, Options, report, served_model, write
from lightning_lowprec.serving.formats import find_format
from lightning_lowprec.serving.safetensors_files import check_out
from lightning_lowprec.serving.sources import LiveModel, WithoutAdapter
from lightning_lowprec.tools import strict_json
from lightning_lowprec.tools.planning.source import load
from lightning_lowprec.tools.serving.check import Bounds, Result, check, refuse_unchecked
from lightning_lowprec.tools.serving.checkpoint import Renamed, backend_of, read_config
from lightning_lowprec.tools.terminal import prints_to_stderr, working


def run(args: Any) -> int:
    """Write the folder, print what was written, and with ``--check`` compare; return 1 if a bound is not held."""
    out, bounds, options = Path(args.out), take_bounds(args), _options(args)
    check_out(out)
    with prints_to_stderr(wanted=args.json):
        with working(f"reading {args.checkpoint}"):
            opened = _open(args)
        if args.check:
            refuse_unchecked(opened.model, args.format)
        done = _write(args, opened, out, options)
        if not args.json:
            print(done.text())
            if opened.left_out:
                print(f"{opened.left_out} tensors of the checkpoint belong to other modules, and were left out")
        result = None
        if args.check:
            adapted = WithoutAdapter(opened.source, opened.adapter, merge=args.merge_adapters)
            with working("checking") as shown:
                result = check(opened.model, adapted, out, bounds, say=shown.say)
    if args.json:
        print(strict_json.dumps(_as_json(options, done, opened.left_out, result)))
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


@final
@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint, and the model that it is of."""

    source: Source
    """By the names of the model."""
    model: Any
    """On the meta device."""
    adapter: Mapping[str, Any] | None
    trained_by: str | None
    """The backend that the checkpoint names."""
    left_out: int


def _open(args: Any) -> Opened:
    model = served_model(load(args.model, {}).model)
    model.tie_weights()
    stored = open_weights(Path(args.checkpoint), args.key)
    known = {*model.state_dict(), *(name for name, _ in model.named_buffers())}
    source = Renamed(stored, LiveModel(model).shapes, known, args.strip_prefix)
    adapter = None if args.adapter_config is None else read_config(Path(args.adapter_config))
    return Opened(
        source=source, model=model, adapter=adapter, trained_by=backend_of(stored.content), left_out=source.left_out
    )


def _options(args: Any) -> Options:
    return Options(
        format=args.format,
        dtype=args.dtype,
        weights_only=args.weights_only,
        merge_adapters=args.merge_adapters,
        files_from=_files_from(args),
    )


def _write(args: Any, opened: Opened, out: Path, options: Options) -> Exported:
    choice = NOTHING if find_format(args.format).scale_per is None else _choice(args, opened)
    return write(opened.source, opened.model, choice, out, options, opened.adapter)


def _files_from(args: Any) -> Path | None:
    """Return the folder of the tokenizer: the one that is named, or that of ``--model``."""
    if args.tokenizer is not None:
        return Path(args.tokenizer)
    model = Path(args.model)
    return model if model.is_dir() else model.parent if model.is_file() else None


def _choice(args: Any, opened: Opened) -> RoundedWeights:
    """Return which weights become codes: the plan of the precision, with the options that the run had."""
    name = args.precision
    _check_precision(name, opened.trained_by)
    trained_in_fp8 = name is not None and precisions.TABLE.get(name) is not None
    row = precisions.resolve(name) if trained_in_fp8 else precisions.resolve(WITHOUT_FP8)
    in_fp8 = trained_in_fp8 and row.plugin.backend is not None
    row = row if in_fp8 else precisions.resolve(WITHOUT_FP8)
    plan = make_plan(opened.model, args.layers, replace(row.plan_request(), pads=None))
    if not plan.converted:
        raise ValueError(f"the plan of {name or WITHOUT_FP8!r} converts no layer:\n{plan}\nUse `--format hf`.")
    return of_plan(plan, row.weight_rounding() if in_fp8 else None)


def _check_precision(name: str | None, trained_by: str | None) -> None:
    if name is not None:
        validate_name(name)
    row = None if name is None or name not in precisions.TABLE else precisions.resolve(name)
    backend = None if row is None else row.plugin.backend
    if trained_by is None or backend == trained_by:
        return
    expected = ", ".join(backends.get(trained_by).names)
    if name is None:
        raise ValueError(
            f"the checkpoint was trained by {trained_by}, and does not say by which recipe. Name the precision of the"
            f" run with `--precision`, so that the codes are those of the last step; one of: {expected}."
        )
    raise ValueError(
        f"`precision={name!r}` is not valid: the checkpoint was trained by {trained_by}. Expected one of: {expected}."
    )


def take_bounds(args: Any) -> Bounds:
    """Return the bounds of the check."""
    return Bounds(
        min_snr=args.min_snr,
        min_agreement=args.min_agreement,
        max_perplexity=args.max_perplexity,
        text=None if args.check_text is None else Path(args.check_text),
    )
