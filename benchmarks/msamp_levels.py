"""Compare MS-AMP's levels with float32: the final loss of a training, and the bytes per weight.

    python -m benchmarks.msamp_levels [--steps 500] [--seeds 0 1 2] [--levels fp32 O1 O2 O3] [--optimizer adamw]

A byte-level GPT learns Python's standard library, once per level and seed: equal initial weights, equal batches, the
same learning rate. The mean over the seeds of the validation loss after the last step is compared with that of float32.
FP8 is emulated on CPU: the products are products of dequantised codes. Every Linear except the head is scaled.

O2 and O3 end with the same bits, because their GEMMs read the same float16 weights rounded to e4m3 (O3 rounds once per
step). O2 and O3 keep and send different formats.

``--out`` is written after each run. Runs that the file already has, with the same number of steps, are not repeated.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from benchmarks.gpu_lane import machine
from lightning_lowprec.msamp.adamw_sgd import ScaledAdamW, ScaledSGD
from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.linear import scale_linears
from lightning_lowprec.msamp.weight import msamp_state_of
from lightning_lowprec.tools.demo import ByteGPT, StdlibText
from lightning_lowprec.tools.demo.model import WARMUP_STEPS

FP32 = "fp32"
LEVELS = (FP32, "O1", "O2", "O3")
TOLERANCE = 0.015
"""The largest allowed relative difference of a level's mean loss from that of float32."""
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.01},
    "sgd": {"lr": 0.1, "momentum": 0.9},
}
THEIRS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
OURS = {"adamw": ScaledAdamW, "sgd": ScaledSGD}
SCALED = ("qkv", "proj", "fc_in", "fc_out")


def build(level: str, seed: int, optimizer: str, **sizes: int) -> tuple[ByteGPT, Optimizer, list[nn.Parameter]]:
    """Return the model, its optimizer, and the weights that a level of MS-AMP changes."""
    torch.manual_seed(seed)
    model = ByteGPT(**sizes)
    fqns = [fqn for fqn, _ in model.named_modules() if fqn.endswith(SCALED)]
    if level == FP32:
        made: Optimizer = THEIRS[optimizer](model.parameters(), **OPTIONS[optimizer])
    else:
        scale_linears(model, fqns, level)  # type: ignore[arg-type]
        made = OURS[optimizer](model.parameters(), level=level, **OPTIONS[optimizer])
    return model, made, [model.get_submodule(fqn).weight for fqn in fqns]


def bytes_held(weights: Sequence[nn.Parameter], optimizer: Optimizer) -> float:
    """Return the bytes per weight of weights, gradients, masters and moments; each storage counts once."""
    tensors: list[Any] = []
    for p in weights:
        scaled = msamp_state_of(p)
        grad = (p.grad.codes, p.grad.inv_scale) if isinstance(p.grad, ScaledGradient) else (p.grad,)
        tensors += [*grad, *optimizer.state[p].values(), *((p,) if scaled is None else vars(scaled).values())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if isinstance(t, Tensor)}
    return sum(s.nbytes() for s in storages.values()) / sum(p.numel() for p in weights)


def loss_of(model: ByteGPT, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def validate(model: ByteGPT, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    return statistics.fmean(loss_of(model, batch).item() for batch in batches)


def train(level: str, seed: int, steps: int, optimizer: str = "adamw", **sizes: int) -> dict[str, float]:
    """Train once: ``val_loss`` after the last step, ``bytes_per_weight`` between its backward and the step."""
    model, made, weights = build(level, seed, optimizer, **sizes)
    data = StdlibText(seed=seed, block_size=model.block_size, train_windows=max(16_384, 8 * steps))
    data.setup("fit")
    warmup = torch.optim.lr_scheduler.LinearLR(made, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
    held = 0.0
    batches = zip(range(steps), data.train_dataloader(), strict=False)
    for step, batch in tqdm(batches, f"{optimizer} {level} seed {seed}", steps, leave=False):
        loss_of(model, batch).backward()
        if step == steps - 1:
            held = bytes_held(weights, made)
        made.step()
        made.zero_grad()
        warmup.step()
    return {"val_loss": validate(model, data.val_dataloader()), "bytes_per_weight": held}


def differences(runs: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return by level the relative difference of the mean loss from that of float32, over the seeds that both have."""
    found = {}
    for level, by_seed in runs.items():
        seeds = by_seed.keys() & runs.get(FP32, {}).keys()
        if level != FP32 and seeds:
            mean = {name: statistics.fmean(runs[name][seed]["val_loss"] for seed in seeds) for name in (FP32, level)}
            found[level] = mean[level] / mean[FP32] - 1
    return found


def table(runs: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the results as text."""
    apart = differences(runs)
    lines = [f"{'level':<6} {'val loss by seed':<28} {'mean':>8} {'to fp32':>9} {'bytes per weight':>17}"]
    for level, by_seed in runs.items():
        losses = [by_seed[seed]["val_loss"] for seed in sorted(by_seed)]
        held = statistics.fmean(run["bytes_per_weight"] for run in by_seed.values())
        shown = "" if level not in apart else f"{apart[level]:+.2%}"
        by = " ".join(f"{loss:.4f}" for loss in losses)
        lines.append(f"{level:<6} {by:<28} {statistics.fmean(losses):>8.4f} {shown:>9} {held:>17.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every level is within the tolerance, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--optimizer", choices=THEIRS, default="adamw")
    parser.add_argument("--out", type=Path, help="JSON file to write, and to continue")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {"steps": args.steps, "optimizers": {}}
    if args.out is not None and args.out.exists():
        found = json.loads(args.out.read_text())
        if found["steps"] != args.steps:
            parser.error(f"{args.out} has runs of {found['steps']} steps, not {args.steps}; give another --out.")
    runs = found["optimizers"].setdefault(args.optimizer, {"options": OPTIONS[args.optimizer], "runs": {}})["runs"]
    found |= {
        "device": "CPU, emulated FP8",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "commit": machine.commit(),
        "machine": machine.facts(torch.device("cpu")),
    }
    for seed in args.seeds:
        for level in args.levels:
            if str(seed) in runs.setdefault(level, {}):
                continue
            runs[level][str(seed)] = train(level, seed, args.steps, args.optimizer)
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(runs))
    return int(any(abs(apart) > TOLERANCE for apart in differences(runs).values()))


if __name__ == "__main__":
    raise SystemExit(main())
