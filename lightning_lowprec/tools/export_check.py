"""Compare an exported folder with its checkpoint: both models run by transformers on CPU, one after the other.

The checkpoint runs in float32, the folder as transformers loads it.

The reference continues a prompt greedily. The folder's model then reads the text and this continuation once, so both
models see the same tokens at every place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec.checkpoints.weights import Source
from lightning_lowprec.extras import require
from lightning_lowprec.serving.content import step_of
from lightning_lowprec.serving.formats import FormatName
from lightning_lowprec.serving.sources import named_tensors

GREEDY_TOKENS: Final = 256
_PROMPT: Final = 32
_TEXT_TOKENS: Final = 512
_READ_WITH: Final[Mapping[FormatName, str]] = {"hf-fp8-block": "accelerate", "compressed-tensors": "compressed_tensors"}
"""What transformers needs to load a format."""


@final
@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What an exported model must hold.

    Args:
        min_snr: of the logits, dB.
        min_agreement: the share of greedy tokens that are the same.
        max_perplexity: perplexity of the folder / of the checkpoint - 1, absolute.
        text: the text of the perplexity; None: tokens at random, whose perplexity says little.
    """

    min_snr: float = 15.0
    min_agreement: float = 0.8
    max_perplexity: float = 0.05
    text: Path | None = None

    def __post_init__(self) -> None:
        """Check the text."""
        if self.text is not None and not self.text.is_file():
            raise ValueError(f"`check_text={str(self.text)!r}` is no file; expected a text.")


@final
@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured, and the bounds."""

    snr: float
    agreement: float
    tokens: int
    perplexity: tuple[float, float]
    """Of the checkpoint and of the folder."""
    bounds: Bounds

    @property
    def perplexity_change(self) -> float:
        """The relative difference of the perplexities."""
        before, after = self.perplexity
        return after / before - 1

    @property
    def failures(self) -> list[str]:
        """The bounds that are not held; NaN holds none."""
        found = []
        if not self.snr >= self.bounds.min_snr:
            found.append(f"the logits' SNR is below --min_snr {self.bounds.min_snr:g} dB")
        if not self.agreement >= self.bounds.min_agreement:
            found.append(f"the greedy agreement is below --min_agreement {self.bounds.min_agreement:g}")
        if not abs(self.perplexity_change) <= self.bounds.max_perplexity:
            found.append(f"the perplexity differs by more than --max_perplexity {self.bounds.max_perplexity:g}")
        return found

    @property
    def holds(self) -> bool:
        """Whether all bounds are held."""
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """Return what was measured, and the bounds that are not held."""
        before, after = self.perplexity
        return {
            "snr_db": self.snr,
            "greedy_agreement": self.agreement,
            "greedy_tokens": self.tokens,
            "perplexity_of_the_checkpoint": before,
            "perplexity_of_the_folder": after,
            "perplexity_change": self.perplexity_change,
            "failures": self.failures,
            "holds": self.holds,
        }

    def text(self) -> str:
        """Return some lines for people."""
        before, after = self.perplexity
        same = round(self.agreement * self.tokens)
        lines = [
            f"check: logits {self.snr:.1f} dB from the checkpoint's",
            f"check: {same} of {self.tokens} greedy tokens are the same ({100 * self.agreement:.1f} %)",
            f"check: perplexity {after:.4g}, the checkpoint's {before:.4g} ({100 * self.perplexity_change:+.2f} %)",
        ]
        return "\n".join(lines + [f"check failed: {failure}" for failure in self.failures])


class _Reference(NamedTuple):
    text: Tensor
    """[1, T] int64."""
    greedy: Tensor
    """[1, P + G] int64: a prompt and its continuation."""
    logits: Tensor
    """Of the text, [T, V]."""


def refuse_unchecked(skeleton: Any, format: FormatName) -> None:
    """Raise if a folder of this model and format cannot be compared here.

    Raises:
        ImportError: a package that loads the folder is not installed.
        ValueError: the model is no causal language model.
    """
    transformers = require("transformers", "--check")
    if not isinstance(skeleton, transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(skeleton.config), ())):
        raise ValueError(
            f"`--check` takes causal language models, and {type(skeleton).__name__} is none; leave it out."
        )
    if format in _READ_WITH:
        require(_READ_WITH[format], f"`--check` of `--format {format}`")


def check(
    skeleton: Any, source: Source, out: Path, bounds: Bounds, *, say: Callable[[str], None] = lambda _: None
) -> Result:
    """Compare."""
    transformers = require("transformers", "--check")
    say("checking: the model of the checkpoint generates")
    reference = _measure_reference(skeleton, source, _tokens(out, bounds, skeleton.config))
    say("checking: the model of the folder reads")
    served = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    with torch.no_grad():
        logits = served(reference.text).logits[0].float()
        chosen = served(reference.greedy).logits[0].argmax(-1)
    new = reference.greedy.shape[1] - min(_PROMPT, reference.text.shape[1])
    agreement = (chosen[-new - 1 : -1] == reference.greedy[0, -new:]).float().mean().item()
    return Result(
        snr=_snr(reference.logits, logits),
        agreement=agreement,
        tokens=new,
        perplexity=(_perplexity(reference.logits, reference.text), _perplexity(logits, reference.text)),
        bounds=bounds,
    )


def _tokens(out: Path, bounds: Bounds, config: Any) -> Tensor:
    """Return a text: [1, T] int64."""
    most = min(_TEXT_TOKENS, getattr(config, "max_position_embeddings", _TEXT_TOKENS))
    if bounds.text is not None:
        tokenizer = require("transformers", "--check_text").AutoTokenizer.from_pretrained(out)
        tokens: Tensor = tokenizer(bounds.text.read_text(), return_tensors="pt").input_ids[:, :most]
        return tokens
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, config.vocab_size, (1, min(most, 128)), generator=generator)


@torch.no_grad()
def _measure_reference(skeleton: Any, source: Source, text: Tensor) -> _Reference:
    model = _build(skeleton, source)
    logits = model(text).logits[0].float()
    prompt = text[:, :_PROMPT]
    limit = getattr(skeleton.config, "max_position_embeddings", _PROMPT + GREEDY_TOKENS)
    count = min(GREEDY_TOKENS, limit - prompt.shape[1])
    greedy, cache = prompt, None
    step = prompt
    for _ in range(count):
        output = model(step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        step = output.logits[:, -1:].argmax(-1)
        greedy = torch.cat([greedy, step], dim=1)
    return _Reference(text, greedy, logits)


def _build(skeleton: Any, source: Source) -> nn.Module:
    """Return the model with the values of the checkpoint, in float32 on CPU."""
    model = type(skeleton)(skeleton.config)
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            count = tensor.shape[0] if tensor.dim() else 1
            step = step_of(tuple(tensor.shape) or (1,))
            target = tensor if tensor.dim() else tensor.view(1)
            for start in range(0, count, step):
                stop = min(start + step, count)
                target[start:stop] = source.rows(name, start, stop)
    built: nn.Module = model.float().eval()
    return built


def _snr(reference: Tensor, logits: Tensor) -> float:
    noise = (reference - logits).square().sum(dtype=torch.float64).item()
    signal = reference.square().sum(dtype=torch.float64).item()
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if noise == noise else math.nan


def _perplexity(logits: Tensor, text: Tensor) -> float:
    return F.cross_entropy(logits[:-1], text[0, 1:]).exp().item()
