"""Count the norm weights that are still exactly 1.0 after a training in bf16, with and without exact masters.

OMP_NUM_THREADS=1 python -m benchmarks.evidence.norms        # four models, 500 steps, two precisions, one seed
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn

from benchmarks.evidence.__main__ import SIZES, spec_of
from lightning_lowprec.tools.class_path import load_class

MODELS = ("gpt", "llama", "vit", "control")
PRECISIONS = ("bf16-true", "bf16-remainder")


def norm_weights(model: nn.Module) -> torch.Tensor:
    """Return the weights of all norms."""
    return torch.cat([m.weight.detach().float() for m in model.modules() if "Norm" in type(m).__name__])


def trained(name: str, precision: str, steps: int) -> tuple[int, int, float]:
    """Return how many norm weights stay at 1.0, how many there are, and the validation loss."""
    spec = spec_of(name, [precision], Path("unused"), steps=steps, seeds=2, sizes=SIZES)
    L.seed_everything(0, verbose=False)
    model = load_class(spec.model)(**spec.model_args)
    data = load_class(spec.data)(**spec.data_args)
    trainer = L.Trainer(
        precision=precision, max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=spec.val_batches,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, data)
    weights = norm_weights(model)
    loss = trainer.validate(model, data, verbose=False)[0]
    return int((weights == 1).sum()), weights.numel(), next(iter(loss.values()))


def main(steps: int = 500) -> None:
    """Print a row for each model and precision."""
    for name in MODELS:
        for precision in PRECISIONS:
            still, of, loss = trained(name, precision, steps)
            print(f"{name:8} {precision:15} {still:5} of {of:5} norm weights at 1.0   validation loss {loss:.4f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
