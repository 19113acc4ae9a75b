"""Train four small models under every precision that a CPU trains, and compare the losses with those of float32.

    make evidence                                                  # the committed size, into evidence-out/
    python -m benchmarks.evidence --out FOLDER --models gpt,vit    # some models only
    python -m benchmarks.evidence --names fp8-hybrid --steps 20    # some precisions, other numbers of steps

Each model is one ``lowprec compare``, whose folder is in --out. A model whose folder has results is left as it is, so
a stopped call goes on with the next; two calls with other --models may share the cores. gaps.md has all gaps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
from typing_extensions import override

from benchmarks.evidence.digits import VAL_BATCH
from benchmarks.evidence.gaps import gaps_of, overview
from benchmarks.evidence.names import BASELINE, left_out, on_cpu, without_ending
from lightning_lowprec.tools.compare.runner import fit, train_all
from lightning_lowprec.tools.options import CompareSpec

STEPS: Final = {"gpt": 180, "llama": 140, "vit": 200, "lora": 80, "control": 120}
BASE_STEPS: Final = 400
LEARNING_RATES: Final = {"gpt": 4e-3, "llama": 5e-3, "vit": 2e-3, "lora": 5e-3, "control": 1e-4, "base": 4e-3}
CLASSES: Final = {"gpt": "DecayedGPT", "llama": "ByteLlama", "vit": "DigitViT", "lora": "LoraLlama",
                  "control": "DecayedGPT", "base": "ByteLlama"}  # fmt: skip
SIZES: Final[Mapping[str, Any]] = {"depth": 2, "width": 64, "heads": 4}
TOY: Final[Mapping[str, Any]] = {"depth": 1, "width": 16, "heads": 2}
BLOCK, BATCH, VAL_WINDOWS = 64, 8, 256
CONTROL: Final = (BASELINE, "bf16-true", "bf16-master", "bf16-sr")
"""Of the positive control, a small learning rate: bf16 weights lose updates; masters and random rounding keep them."""


def spec_of(model: str, names: Sequence[str], out: Path, *, steps: int, seeds: int, sizes: Mapping[str, Any]) -> Any:
    """Return the comparison of one model, whose validation runs twice."""
    windows = VAL_WINDOWS if sizes is SIZES else 16
    arguments = {**sizes, "lr": LEARNING_RATES[model], "steps": steps}
    text = {"block_size": BLOCK, "batch_size": BATCH, "train_windows": BATCH * steps, "val_windows": windows}
    data, data_args, batches = "lightning_lowprec.tools.demo.StdlibText", text, windows // BATCH
    if model == "vit":
        arguments["patch"] = 7
        data, batch = "benchmarks.evidence.digits.Digits", 32
        data_args = {"batch_size": batch, "train_pictures": batch * steps, "val_pictures": 2 * windows}
        batches = -(-2 * windows // (VAL_BATCH * batch))
    else:
        arguments["block_size"] = BLOCK
    if model == "lora":
        arguments |= {"rank": 8, "base": str(out.parent)}
        data = "benchmarks.evidence.text.HeaderText"
    return CompareSpec(
        precisions=tuple(names), model=f"benchmarks.evidence.models.{CLASSES[model]}", model_args=arguments, data=data,
        data_args=data_args, max_steps=steps, val_every=max(1, steps // 2), val_batches=batches, accelerator="cpu",
        seeds=seeds, out=out,
    )  # fmt: skip


class Keep(L.Callback):
    """Writes the weights of a Llama after the last step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save(pl_module.llama.state_dict(), self.path)


def train(model: str, spec: CompareSpec, base_steps: int, sizes: Mapping[str, Any]) -> None:
    """Train one model; before a fine-tune, the base of each seed, in float32.

    Raises:
        ValueError: the folder has results with other settings.
    """
    results = spec.out / "results.json"
    if results.exists():
        before, now = json.loads(results.read_text())["spec"], json.loads(json.dumps(vars(spec), default=str))
        if before != now:
            differ = ", ".join(sorted(key for key in now if before.get(key) != now[key]))
            raise ValueError(
                f"{spec.out} has results with other settings ({differ}). Give another --out, or delete it."
            )
        print(f"{spec.out}: has results, left as it is", file=sys.stderr)
        return
    if model == "lora":
        base = spec_of("base", [BASELINE], spec.out, steps=base_steps, seeds=1, sizes=sizes)
        for seed in range(spec.seeds):
            fit(base, BASELINE, seed, lambda message: None, [Keep(spec.out.parent / f"base-{seed}.pt")])
    train_all(spec)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("evidence-out"), help="folder for the results")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each precision, at least 2")
    parser.add_argument("--names", type=lambda words: words.split(","), help="only these, comma-separated, and float32")
    parser.add_argument("--models", default=",".join(STEPS), help=f"only these: {', '.join(STEPS)}")
    parser.add_argument("--steps", type=int, help="steps of every model; default: 80 to 200, by model")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to see that it runs")
    options = parser.parse_args(argv)
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds} is not valid; expected 2 or more: intervals are over seeds.")
    from benchmarks.evidence import devices  # noqa: F401  # makes names known

    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    sizes, every = (TOY if options.smoke else SIZES), on_cpu()
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    try:
        for model in options.models.split(","):
            chosen = {"vit": without_ending(every), "lora": without_ending(every), "control": CONTROL}.get(model, every)
            names = chosen if options.names is None else (BASELINE, *options.names)
            steps = options.steps or STEPS[model]
            spec = spec_of(model, names, options.out / model, steps=steps, seeds=options.seeds, sizes=sizes)
            train(model, spec, options.steps or BASE_STEPS, sizes)
            found[model] = gaps_of(json.loads((spec.out / "results.json").read_text()))
    except (ValueError, KeyError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out().items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    reasons = [f"- {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    text = "\n".join([overview(found), "", "Names that do not train on this CPU:", "", *reasons])
    (options.out / "gaps.md").write_text(f"{text}\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
