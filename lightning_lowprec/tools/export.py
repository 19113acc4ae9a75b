"""``lowprec export``: a folder for servers; with ``--check`` compared with its checkpoint."""

import math
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec import names as precisions
from lightning_lowprec.checkpoints.optimizer_state import clean
from lightning_lowprec.checkpoints.weights import Shape, Source, open_weights
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.extras import require
from lightning_lowprec.messages import dtype_name
from lightning_lowprec.precision.loss_scale import BACKEND_STATE
from lightning_lowprec.serving import sources
from lightning_lowprec.serving.content import NOTHING, WITHOUT_FP8, RoundedWeights, of_plan, spans
from lightning_lowprec.serving.export import Options, report, served_model, write
from lightning_lowprec.serving.formats import FormatName, find_format
from lightning_lowprec.serving.safetensors_files import check_out
from lightning_lowprec.tools.output import dumps, prints_to_stderr, working
from lightning_lowprec.tools.planning.source import load, read_json

_SHOWN: Final = 3
_ADAPTER_CONFIG: Final = "adapter_config.json"


def run(args: Namespace) -> int:
    """Write the folder and print what it holds; with ``--check`` compare it with the checkpoint."""
    out, named = Path(args.out), Path(args.model)
    beside = named.parent if named.is_file() else None
    options = Options(
        format=args.format,
        dtype=args.dtype,
        weights_only=args.weights_only,
        merge_adapters=args.merge_adapters,
        files_from=Path(args.tokenizer) if args.tokenizer is not None else named if named.is_dir() else beside,
    )
    check_out(out)
    with prints_to_stderr(wanted=args.json):
        with working(f"reading {args.checkpoint}"):
            model = served_model(load(args.model, {}).model)
            model.tie_weights()
            stored = open_weights(Path(args.checkpoint), args.key)
            known = {*model.state_dict(), *(name for name, _ in model.named_buffers())}
            source, left_out = tensors_of_model(stored, sources.live_model(model).shapes, known, args.strip_prefix)
            adapter = None if args.adapter_config is None else read_config(Path(args.adapter_config))
        if args.check:
            refuse_unchecked(model, args.format, args.check_text)
        has_codes = find_format(args.format).scale_per is not None
        choice = _choice(args, model, backend_of(stored.content)) if has_codes else NOTHING
        done = write(source, model, choice, out, options, adapter)
        if not args.json:
            print(done.text())
            if left_out:
                print(f"{left_out} tensors of the checkpoint belong to other modules, and were left out")
        result, failures = None, list[str]()
        if args.check:
            adapted = sources.WithoutAdapter(source, adapter, merge=args.merge_adapters)
            with working("checking") as shown:
                result = check(model, adapted, out, args.check_text, shown.say)
            failures = result.failures(args)
    if args.json:
        written = {
            "out": str(done.out),
            "bytes": done.size,
            "tensors_written": done.tensors,
            "tensors_left_out": left_out,
            "adapter_layers": done.adapter_layers,
        }
        of_check = None if result is None else {**asdict(result), "failures": failures, "holds": not failures}
        print(dumps({**written, **report(options, done), "check": of_check}))
    elif result is not None:
        print(result.text(failures, args.check_text or "tokens at random"))
    return bool(failures)


def _choice(args: Namespace, model: nn.Module, trained_by: str | None) -> RoundedWeights:
    """Return which weights become codes: the plan of the precision, with the options that the run had."""
    name = args.precision
    row = precisions.TABLE.get(name)
    backend = None if row is None else row.backend
    if trained_by is not None and backend != trained_by:
        expected = ", ".join(backends.get(trained_by).names)
        if name is not None:
            raise ValueError(
                f"`precision={name!r}` is not valid: the checkpoint was trained by {trained_by}. Expected one of:"
                f" {expected}."
            )
        raise ValueError(
            f"the checkpoint was trained by {trained_by}, and does not say by which recipe. Name the precision of the"
            f" run with `--precision`, so that the codes are those of the last step; one of: {expected}."
        )
    in_fp8 = row is not None and backend is not None
    if row is None or not in_fp8:
        row = precisions.TABLE[WITHOUT_FP8]
    plan = make_plan(model, args.layers, replace(row.plan_request(), pads=None))
    if not plan.converted:
        raise ValueError(f"the plan of {name or WITHOUT_FP8!r} converts no layer:\n{plan}\nUse `--format hf`.")
    return of_plan(plan, row.weight_rounding() if in_fp8 else None)


# ---- the tensors of a model in a checkpoint: by name, behind the prefix of a LightningModule's attribute


def backend_of(content: object) -> str | None:
    """Return the name of the backend that a checkpoint says it was trained by; None: it does not say."""
    if not isinstance(content, Mapping):
        return None
    names = {backend.name for backend in backends.registered()}
    states = [value for value in content.values() if isinstance(value, Mapping)]
    return next((str(s[BACKEND_STATE]) for s in states if s.get(BACKEND_STATE) in names), None)


def read_config(path: Path) -> dict[str, object]:
    """Return the config of a LoRA adapter, as PEFT writes it, of a file, or of the folder that holds one."""
    file = path / _ADAPTER_CONFIG if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"`adapter_config={str(path)!r}` is not valid; expected {_ADAPTER_CONFIG} of PEFT, or its folder."
        )
    config = read_json(file, "a config of PEFT")
    if config.get("peft_type") != "LORA" or "lora_alpha" not in config:
        raise ValueError(f"{str(file)!r} is no config of a LoRA adapter; expected `peft_type='LORA'`, `lora_alpha`.")
    return config


def tensors_of_model(
    source: Source, wanted: Mapping[str, Shape], known: Collection[str], prefix: str | None
) -> tuple[Source, int]:
    """Return the tensors of a checkpoint that a model has, by the model's names, and the number of the others.

    ``wanted`` are the tensors of the model; ``known`` has all its names, also of tied ones and of buffers that no state
    dict holds. Names without the ``prefix`` are of other modules; None: the prefix is found.
    """
    names = {clean(name): name for name in source.shapes}
    coded = [n for n, shape in source.shapes.items() if shape.dtype.itemsize == 1 and shape.dtype != torch.bool]
    if coded:
        dtype = dtype_name(source.shapes[coded[0]].dtype)
        raise ValueError(
            f"the checkpoint holds codes of low precision ({coded[0]!r} is {dtype}), so it was exported or quantised"
            " already. Give the checkpoint of the training run."
        )
    prefix = _prefix(names, wanted) if prefix is None else prefix
    inside = {name.removeprefix(prefix): stored for name, stored in names.items() if name.startswith(prefix)}
    chosen = {n: stored for n, stored in inside.items() if sources.model_name(n) in wanted or sources.is_of_adapter(n)}
    present = {sources.model_name(name): source.shapes[stored].size for name, stored in chosen.items()}
    missing = [name for name in wanted if name not in present]
    strange = [name for name in inside if name not in chosen and sources.model_name(name) not in known]
    wrong = [
        f"{name!r} is {tuple(size)} in the checkpoint and {tuple(wanted[name].size)} in the model"
        for name, size in present.items()
        if name in wanted and size != wanted[name].size
    ]
    if missing or wrong or strange:
        raise ValueError(_another_model(missing, strange, wrong))
    return sources.renamed(source, chosen), len(names) - len(inside)


def _prefix(names: Mapping[str, str], wanted: Mapping[str, Shape]) -> str:
    """Return the prefix with which most names of the model are in the checkpoint."""
    plain = {sources.model_name(name) for name in names}
    candidates = {""} | {name.removesuffix(last) for last in list(wanted)[-4:] for name in plain if name.endswith(last)}
    return max(sorted(candidates), key=lambda prefix: sum(prefix + name in plain for name in wanted))


def _another_model(missing: list[str], strange: list[str], wrong: list[str]) -> str:
    parts = [
        f"{text} {len(names)}: {', '.join(map(repr, names[:_SHOWN]))}{', ...' if len(names) > _SHOWN else ''}"
        for text, names in (("lacks", missing), ("has beside them", strange))
        if names
    ]
    parts += [f"{len(wrong)} have other shapes: {'; '.join(wrong[:_SHOWN])}"] if wrong else []
    return (
        f"the checkpoint is of another model than `--model`: of the model's tensors it {'; '.join(parts)}. Give the"
        " config of the model that was trained, `--key` for the key of the weights, or `--strip_prefix` for what stands"
        " before every name."
    )


# ---- the check

GREEDY_TOKENS: Final = 256
_PROMPT: Final = 32
_TEXT_TOKENS: Final = 512
_LOADERS: Final[Mapping[FormatName, str]] = {"hf-fp8-block": "accelerate", "compressed-tensors": "compressed_tensors"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured."""

    snr_db: float
    """Of the logits of the folder, against those of the checkpoint."""
    greedy_agreement: float
    greedy_tokens: int
    perplexity_of_the_checkpoint: float
    perplexity_of_the_folder: float
    perplexity_change: float

    def failures(self, bounds: Namespace) -> list[str]:
        """Return the bounds, options of the command, that are not held; NaN holds none."""
        snr, agreement, change = bounds.min_snr, bounds.min_agreement, bounds.max_perplexity
        ties = "a model that has hardly trained has near ties, where any rounding decides"
        held = {
            f"the logits' SNR is below --min_snr {snr:g} dB": self.snr_db >= snr,
            f"the greedy agreement is below --min_agreement {agreement:g} ({ties})": self.greedy_agreement >= agreement,
            f"the perplexity differs by more than --max_perplexity {change:g}": abs(self.perplexity_change) <= change,
        }
        return [failure for failure, holds in held.items() if not holds]

    def text(self, failures: list[str], tokens: str) -> str:
        """Return some lines for people; ``tokens`` says of what the tokens are."""
        before, after = self.perplexity_of_the_checkpoint, self.perplexity_of_the_folder
        same = round(self.greedy_agreement * self.greedy_tokens)
        lines = [
            f"check, on {tokens}: logits {self.snr_db:.1f} dB from the checkpoint's",
            f"check: {same} of {self.greedy_tokens} greedy tokens are the same ({100 * self.greedy_agreement:.1f} %)",
            f"check: perplexity {after:.4g}, the checkpoint's {before:.4g} ({100 * self.perplexity_change:+.2f} %)",
        ]
        return "\n".join(lines + [f"check failed: {failure}" for failure in failures])


def refuse_unchecked(skeleton: Any, format: FormatName, text: str | None) -> None:
    """Raise if a folder of this model and format cannot be compared here."""
    if text is not None and not Path(text).is_file():
        raise ValueError(f"`check_text={text!r}` is no file; expected a text.")
    transformers = require("transformers", "--check")
    if not isinstance(skeleton, transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(skeleton.config), ())):
        raise ValueError(
            f"`--check` takes causal language models, and {type(skeleton).__name__} is none; leave it out."
        )
    if format in _LOADERS:
        require(_LOADERS[format], f"`--check` of `--format {format}`")


@torch.no_grad()
def check(skeleton: Any, source: Source, out: Path, text: str | None, say: Callable[[str], None]) -> Result:
    """Compare both models, run by transformers on CPU, one after the other.

    The checkpoint, in float32, continues a prompt greedily. The folder's model then reads this continuation once, so
    both see the same tokens at every place. Without a ``text`` the tokens are random, whose perplexity says little.
    """
    transformers = require("transformers", "--check")
    tokens = tokens_of(out, text, skeleton.config)
    say("checking: the model of the checkpoint generates")
    reference = build(skeleton, source)
    expected = reference(tokens).logits[0].float()
    prompt = tokens[:, :_PROMPT]
    limit = getattr(skeleton.config, "max_position_embeddings", _PROMPT + GREEDY_TOKENS)
    new = min(GREEDY_TOKENS, limit - prompt.shape[1])
    greedy = reference.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)  # [1, P + G]
    del reference
    say("checking: the model of the folder reads")
    served = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    logits = served(tokens).logits[0].float()
    chosen = served(greedy).logits[0].argmax(-1)
    before, after = _perplexity(expected, tokens), _perplexity(logits, tokens)
    return Result(
        snr_db=_snr(expected, logits),
        greedy_agreement=(chosen[-new - 1 : -1] == greedy[0, -new:]).float().mean().item(),
        greedy_tokens=new,
        perplexity_of_the_checkpoint=before,
        perplexity_of_the_folder=after,
        perplexity_change=after / before - 1,
    )


def tokens_of(out: Path, text: str | None, config: Any) -> Tensor:
    """Return a text: [1, T] int64."""
    most = min(_TEXT_TOKENS, getattr(config, "max_position_embeddings", _TEXT_TOKENS))
    if text is not None:
        tokenizer = require("transformers", "--check_text").AutoTokenizer.from_pretrained(out)
        tokens: Tensor = tokenizer(Path(text).read_text(), return_tensors="pt").input_ids[:, :most]
        return tokens
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, config.vocab_size, (1, min(most, 128)), generator=generator)


def build(skeleton: Any, source: Source) -> Any:
    """Return the model with the values of the checkpoint, in float32 on CPU."""
    model = type(skeleton)(skeleton.config)
    for name, tensor in sources.named_tensors(model).items():
        target = tensor if tensor.dim() else tensor.view(1)
        for start, stop in spans(tuple(target.shape)):
            target[start:stop] = source.rows(name, start, stop)
    return model.float().eval()


def _snr(reference: Tensor, logits: Tensor) -> float:
    noise = (reference - logits).square().sum().item()
    signal = reference.square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if noise == noise else math.nan


def _perplexity(logits: Tensor, text: Tensor) -> float:
    return F.cross_entropy(logits[:-1], text[0, 1:]).exp().item()
