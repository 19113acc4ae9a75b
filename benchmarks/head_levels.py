"""Compare forms of the head and of the weights: the validation loss after a training, over several seeds.

    python -m benchmarks.head_levels [--steps 500] [--seeds 0 1 2] [--rows NAMES] [--reference NAME]
        [--out results.json]

The byte-level GPT of ``lowprec compare`` learns Python's standard library by Fabric: equal initial weights, equal
batches. A row is a precision and a form of head and loss: the model's own ("bf16"), ``linear_cross_entropy`` in chunks
("chunked"), or in FP8 ("fp8"). FP8 is emulated on CPU. Validation always takes the model's own head and loss.
``--out`` is written after each run, and what it has is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks.gpu_lane import machine
from lightning_lowprec.losses import linear_cross_entropy
from lightning_lowprec.tools.demo import ByteGPT, StdlibText

REFERENCE = "half-auto, bf16"
ROWS = (
    REFERENCE, "half-auto, chunked", "half-auto, fp8", "fp8-tensorwise, bf16", "fp8-tensorwise, fp8",
    "fp8-tensorwise-remainder, bf16", "fp8-tensorwise-remainder, fp8", "fp8-tensorwise-sr, fp8", "32-true, bf16",
    "bf16-remainder, bf16", "bf16-lean, bf16", "bf16-lean-sr, bf16", "fp8-lean, bf16", "msamp-o1, bf16",
    "msamp-o2, bf16", "msamp-o3, bf16",
)  # fmt: skip


class WithLoss(ByteGPT):
    """The model, which returns its loss, so that the head runs inside of Fabric's forward."""

    head = "bf16"

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """(B, T), (B, T) -> the mean loss."""
        if self.head == "bf16" or targets is None:
            logits = super().forward(tokens).float()
            return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        x = self.token_embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turn[:, : tokens.shape[-1]])
        return linear_cross_entropy(self.norm(x), self.lm_head.weight, targets, fp8=self.head == "fp8")


def train(row: str, seed: int, steps: int, **sizes: int) -> float:
    """Return the validation loss after ``steps`` of the model with these sizes."""
    precision, _, head = row.partition(", ")
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision)  # type: ignore[arg-type]  # our names
    torch.manual_seed(seed)
    bare = WithLoss(**sizes)
    bare.head = head
    configured: Any = bare.configure_optimizers()
    model, optimizer = fabric.setup(bare, configured["optimizer"])
    warmup = configured["lr_scheduler"]["scheduler"]
    data = StdlibText(seed=seed, block_size=bare.block_size, train_windows=max(16_384, 8 * steps))
    data.setup("fit")
    for _, batch in tqdm(zip(range(steps), data.train_dataloader(), strict=False), f"{row} seed {seed}", steps):
        fabric.backward(model(*batch))
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
    bare.head = "bf16"
    with torch.no_grad():
        return statistics.fmean(model(*batch).item() for batch in data.val_dataloader())


def table(runs: dict[str, dict[str, float]], reference: str) -> str:
    """Return the results as text."""
    lines = [f"{'row':<32} {'validation loss by seed':<28} {'mean':>8} {'spread':>8}  to {reference}"]
    for row, by_seed in runs.items():
        losses = [by_seed[seed] for seed in sorted(by_seed)]
        both = sorted(by_seed.keys() & runs[reference].keys())
        apart = statistics.fmean(by_seed[s] for s in both) / statistics.fmean(runs[reference][s] for s in both) - 1
        mean, by = statistics.fmean(losses), " ".join(f"{loss:.4f}" for loss in losses)
        lines.append(f"{row:<32} {by:<28} {mean:>8.4f} {max(losses) - min(losses):>8.4f} {apart:>+8.2%}")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument(
        "--reference", choices=ROWS, default=REFERENCE, help="the row that the last column compares with"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"steps": args.steps, "machine": machine.facts(torch.device("cpu")), "runs": {}}
    if args.out is not None and args.out.exists():
        found = json.loads(args.out.read_text())
    for seed in args.seeds:
        for row in args.rows:
            if str(seed) not in found["runs"].get(row, {}):
                found["runs"].setdefault(row, {})[str(seed)] = train(row, seed, args.steps)
                if args.out is not None:
                    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found["runs"], args.reference))


if __name__ == "__main__":
    main()
