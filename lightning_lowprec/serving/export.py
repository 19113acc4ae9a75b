"""Write a model to a folder that transformers, vLLM and SGLang load, or hand its tensors to a server that runs already.

See docs/serving.md.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from lightning_lowprec.checkpoints.weights import Source
from lightning_lowprec.checks import check_choice
from lightning_lowprec.messages import dtype_name, in_units
from lightning_lowprec.precision.plain import unwrapped
from lightning_lowprec.private.deepspeed import refuse_zero
from lightning_lowprec.private.transformers import is_model
from lightning_lowprec.serving.content import NOTHING, Content, RoundedWeights, Tally, of_layers
from lightning_lowprec.serving.formats import DtypeName, FormatName, find_format
from lightning_lowprec.serving.safetensors_files import SHARD_BYTES, OneWriter, ShardFiles, first_writes, new_folder
from lightning_lowprec.serving.sources import FOLDER, WithoutAdapter, config_of, live_model

DTYPES: Final[Mapping[str, torch.dtype]] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
BESIDE: Final = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model",
    "sentencepiece*.model", "chat_template*", "generation_config.json", "preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip
"""The files of a model's folder that are copied: tokenizer, chat template, generation, preprocessing."""
REPORT: Final = "lowprec_export.json"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is written; see :func:`export`."""

    format: FormatName
    dtype: DtypeName = "bf16"
    weights_only: bool = False
    merge_adapters: bool = False
    files_from: Path | None = None
    """The folder from which tokenizer and generation files are copied; rank 0 alone must have the folder."""
    shard_bytes: int = SHARD_BYTES
    progress: bool = True

    def __post_init__(self) -> None:
        find_format(self.format)
        check_choice("dtype", self.dtype, DTYPES)


@final
@dataclass(kw_only=True)
class Exported(Tally):
    """What was written."""

    out: Path
    tensors: int
    size: int
    """Bytes of all tensors."""
    coded: tuple[str, ...]
    """The weights in FP8, by their names in the folder."""
    kept: Mapping[str, str]
    adapter_layers: int
    """Layers whose LoRA adapter is in the folder ``adapter``."""

    def text(self) -> str:
        """Return some lines for people."""
        lines = [f"wrote {self.tensors} tensors, {in_units(self.size)}, to {self.out}"]
        if self.coded:
            lines.append(f"{len(self.coded)} weights in FP8, {len(self.kept)} linear layers kept in high precision")
        if self.same:
            lines.append(f"{self.same} weights: the codes are those of the last step, bit for bit")
        if self.other:
            lines.append(f"{self.other} weights: rounded again, since the format needs other scales than the run had")
        if self.new:
            lines.append(f"{self.new} weights: rounded for the first time, by the format's own scales")
        if self.adapter_layers:
            lines.append(f"the LoRA adapter of {self.adapter_layers} layers is in {self.out / FOLDER}, not merged")
        return "\n".join(lines)


def export(
    model: nn.Module,
    out: str | Path,
    *,
    format: FormatName = "compressed-tensors",
    dtype: DtypeName = "bf16",
    weights_only: bool = False,
    merge_adapters: bool = False,
    tokenizer: object = None,
    progress: bool = True,
) -> Exported:
    """Write a live model to a new folder that transformers, vLLM and SGLang load.

    The layers that this package converted become FP8, by the arithmetic that they train with; all others are stored in
    ``dtype``. Rank 0 writes. A sharded model is gathered one tensor at a time, and all ranks call this. Of a model that
    every rank has (DDP), rank 0 must call this; other ranks that call this too wait for rank 0.

    Args:
        model: a model of transformers, or a module that holds one, such as a LightningModule; plain, converted, with a
            LoRA adapter of PEFT, or sharded by FSDP2.
        out: the folder, which must not exist.
        format: ``"hf"`` (high precision), ``"hf-fp8-block"`` or ``"compressed-tensors"``.
        dtype: ``"bf16"``, ``"fp32"`` or ``"fp16"``, of all weights that are no codes.
        weights_only: let servers round weights only, and multiply in ``dtype``.
        merge_adapters: add a LoRA adapter to the weights; else the adapter goes into the folder ``adapter``.
        tokenizer: a tokenizer or processor with ``save_pretrained``, or a folder whose tokenizer files are copied.
        progress: whether a bar is shown, on a terminal.

    Raises:
        ValueError: there is no model of transformers, no layer is converted, a weight holds NaN or inf, or ``out``
            exists.
        OSError: the disk has not enough space, or ``out`` cannot be written. Nothing is left then. All ranks raise.
        RuntimeError: ZeRO-3 has cut the weights.
    """
    refuse_zero(model, "`export(model, out)`")
    inner = served_model(model)
    folder = Path(tokenizer) if isinstance(tokenizer, (str, Path)) else None
    options = Options(
        format=format,
        dtype=dtype,
        weights_only=weights_only,
        merge_adapters=merge_adapters,
        files_from=folder,
        progress=progress,
    )
    weights = _rounded_weights(inner, format)
    saved = tokenizer if folder is None else None

    def writes() -> Exported:
        return write(live_model(inner), inner, weights, Path(out), options, config_of(inner), saved)

    return writes() if _is_sharded(inner) else first_writes(str(out), writes)


def _rounded_weights(model: nn.Module, format: FormatName) -> RoundedWeights:
    if find_format(format).scale_per is None:
        return NOTHING
    weights = of_layers(model)
    if not weights.roundings:
        raise ValueError(
            f"{type(model).__name__} has no layer that runs in FP8, so nothing says which weights become codes. Set the"
            " model up with a precision such as 'fp8-rowwise' first, or use `format='hf'`."
        )
    return weights


def _after_merge(weights: RoundedWeights, source: WithoutAdapter) -> RoundedWeights:
    """No forward has rounded a weight with its adapter."""
    roundings = {name: None if name in source.merged else rounding for name, rounding in weights.roundings.items()}
    return replace(weights, roundings=roundings)


def served_model(model: nn.Module) -> Any:
    """Return the model of transformers that a module is or holds; raise ValueError if there is none, or several."""
    models: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # each once, and before the modules in it
        if is_model(module) and module not in inside:
            models.append(module)
            inside.update(module.modules())
    if len(models) != 1:
        of_others = "Weights of other models are `torch.load('last.ckpt', weights_only=True)['state_dict']`."
        raise ValueError(
            f"{type(model).__name__} holds {len(models)} models of transformers; expected one, whose config servers"
            f" read. {'Pass the model itself.' if models else of_others}"
        )
    return models[0]


def write(
    source: Source,
    model: Any,
    weights: RoundedWeights,
    out: Path,
    options: Options,
    adapter: Mapping[str, object] | None = None,
    tokenizer: Any = None,
) -> Exported:
    """Write the tensors of ``source``, which have the names of a ``model`` of transformers, to the folder ``out``.

    ``adapter`` is the config of a LoRA adapter among the tensors.
    """
    adapted = WithoutAdapter(source, adapter, merge=options.merge_adapters)
    content = Content(
        source=adapted,
        model=model,
        weights=_after_merge(weights, adapted),
        format=find_format(options.format),
        dtype=DTYPES[options.dtype],
        checks=True,
    )
    if weights.roundings and not content.coded:
        reasons = "; ".join(sorted(set(content.kept.values())))
        raise ValueError(
            f"`format={options.format!r}` would store no weight in FP8: {reasons}. Use `format='hf'`, which stores all"
            " weights in high precision."
        )
    config = _config(model, content, options)  # before the weights, because a format may refuse the options
    writer = OneWriter(is_shared=_is_sharded(model))
    with ExitStack() as opened:
        files = writer.on_writer(lambda: opened.enter_context(_new_files(out, content, options)))
        writer.take(content.chunks(), None if files is None else files.write, agree_after=options.shard_bytes)
        kept_adapter = adapted.layers if not options.merge_adapters else 0
        matrices = adapted.tensors(DTYPES[options.dtype]) if kept_adapter else {}
        stored = content.stored()
        done = Exported(
            **vars(content.tally),
            out=out,
            tensors=len(stored),
            size=sum(tensor.size for tensor in stored),
            coded=tuple(content.coded),
            kept=dict(content.kept),
            adapter_layers=kept_adapter,
        )

        def finish() -> None:
            assert files is not None
            files.finish()
            if matrices:
                adapted.save(files.folder / FOLDER, matrices)
            _write_beside(files.folder, model, config, options, tokenizer, done)
            opened.close()  # gives the folder its name

        writer.on_writer(finish)
    return done


@contextmanager
def _new_files(out: Path, content: Content, options: Options) -> Iterator[ShardFiles]:
    if options.files_from is not None and not options.files_from.is_dir():
        raise ValueError(f"`tokenizer={str(options.files_from)!r}` is no folder; expected one with a tokenizer.")
    stored = content.stored()
    size = sum(tensor.size for tensor in stored)
    with (
        new_folder(out, size) as folder,
        tqdm(total=size, unit="B", unit_scale=True, desc="export", disable=None if options.progress else True) as bar,
        ShardFiles(folder, stored, options.shard_bytes, bar.update) as files,
    ):
        yield files


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _config(model: Any, content: Content, options: Options) -> dict[str, object]:
    config: dict[str, object] = json.loads(model.config.to_json_string(use_diff=False))
    for name in ("torch_dtype", "_attn_implementation_autoset"):
        config.pop(name, None)
    name = next(cls.__name__ for cls in type(model).__mro__ if cls.__module__.startswith("transformers."))
    config.update(dtype=dtype_name(DTYPES[options.dtype]), architectures=[name])
    config.pop("quantization_config", None)
    quantization = content.format.config(content.ignored, options.weights_only)
    if quantization is not None:
        config["quantization_config"] = quantization
    return config


def _write_beside(
    folder: Path, model: object, config: Mapping[str, object], options: Options, tokenizer: Any, done: Exported
) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    if options.files_from is not None:
        for file in (file for pattern in BESIDE for file in sorted(options.files_from.glob(pattern)) if file.is_file()):
            shutil.copy(file, folder / file.name)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    (folder / REPORT).write_text(json.dumps(report(options, done), indent=2) + "\n")


def report(options: Options, done: Exported) -> dict[str, object]:
    """Return the content of the file ``lowprec_export.json``."""
    return {
        "format": options.format,
        "dtype": options.dtype,
        "weights_only": options.weights_only,
        "weights_in_fp8": len(done.coded),
        "codes_of_the_last_step": done.same,
        "codes_with_other_scales": done.other,
        "codes_rounded_for_the_first_time": done.new,
        "kept": dict(done.kept),
    }


def fp8_state(
    model: nn.Module,
    *,
    format: FormatName = "compressed-tensors",
    dtype: DtypeName = "bf16",
    merge_adapters: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator of the names and tensors that :func:`lightning_lowprec.export` would write.

    One tensor is made at a time, on the device of the model, so there is no second copy of the model. Of a sharded
    model, each tensor is gathered when its turn comes: all ranks iterate to the end, and every rank gets whole tensors.
    Do not change the weights while you iterate. The device is not waited for, so NaN and inf are handed on.

    Args:
        model: as for ``export``; a module without a model of transformers keeps its own names.
        format: as for ``export``.
        dtype: as for ``export``.
        merge_adapters: add a LoRA adapter to the weights; else the adapter is left out.

    Raises:
        ValueError: an option is not valid, or no layer is converted.
        RuntimeError: ZeRO-3 has cut the weights.
    """
    refuse_zero(model, "`fp8_state(model)`")
    inner = served_model(model) if any(map(is_model, model.modules())) else unwrapped(model)
    check_choice("dtype", dtype, DTYPES)
    weights = _rounded_weights(inner, format)
    source = WithoutAdapter(live_model(inner), config_of(inner), merge=merge_adapters)
    weights = _after_merge(weights, source)
    content = Content(source=source, model=inner, weights=weights, format=find_format(format), dtype=DTYPES[dtype])
    return _tensors(content)


@torch.no_grad()
def _tensors(content: Content) -> Iterator[tuple[str, Tensor]]:
    shapes = {stored.name: stored.shape for stored in content.stored()}
    parts: dict[str, list[Tensor]] = {}
    elements: dict[str, int] = {}
    for name, part in content.chunks():
        parts.setdefault(name, []).append(part)
        elements[name] = elements.get(name, 0) + part.numel()
        if elements[name] == torch.Size(shapes[name]).numel():
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):  # knows no float8
                whole = torch.cat(parts.pop(name))
            yield name, whole.reshape(shapes[name])
