"""Compare an exported folder with its checkpoint: both models run by transformers on CPU, one after the other.

The checkpoint, in float32, continues a prompt greedily. The folder's model then reads this continuation once, so both
models see the same tokens at every place.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_lowprec.checkpoints.weights import Source
from lightning_lowprec.extras import require
from lightning_lowprec.serving.content import spans
from lightning_lowprec.serving.formats import FormatName
from lightning_lowprec.serving.sources import named_tensors

GREEDY_TOKENS: Final = 256
_PROMPT: Final = 32
_TEXT_TOKENS: Final = 512
_LOADERS: Final[Mapping[FormatName, str]] = {"hf-fp8-block": "accelerate", "compressed-tensors": "compressed_tensors"}


@final
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

    def as_json(self, failures: list[str]) -> dict[str, object]:
        """Return what was measured, and the bounds that are not held."""
        return {**asdict(self), "failures": failures, "holds": not failures}

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
    """Compare; without a ``text`` the tokens are random, whose perplexity says little."""
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
    for name, tensor in named_tensors(model).items():
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
