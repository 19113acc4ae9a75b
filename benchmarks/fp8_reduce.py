"""Train a small GPT on two CPU ranks, with gradients that are reduced in float32, in float8, and with error feedback.

python -m benchmarks.fp8_reduce [--steps 500] [--seeds 3] [--out FILE]

The weights are in float32 and everything else is equal, so the losses differ by the reduction alone. Text: Python's
standard library. The signal-to-noise ratio (SNR) compares the gradients that the reduction returned with float32 sums
of the same local gradients. Error feedback adds what a rank's codes lost to the rank's next gradients; it keeps 4 bytes
per parameter of the whole model on every rank, so it is tried here and not built into the package.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_lowprec.fsdp2.traffic import Fp8ReduceScatter
from lightning_lowprec.numerics.fp8_blocks import decode_sum_, to_bytes
from lightning_lowprec.tools.demo import ByteGPT, StdlibText

RANKS = 2
WAYS = ("float32", "float8", "float8 with error feedback", "float32, rounded otherwise")
"""The last way differs in the rounding of float32 only: how far apart such runs end is the measure of the others."""
LAST = 50
"""Steps at the end whose losses are averaged."""
EVERY = 50
"""Steps between measurements of the SNR."""


class Reduction:
    """The reduce-scatter of one FSDP2 group, in one of ``WAYS``; it measures its own error where asked to."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.measures = False
        self.signal = self.noise = 0.0
        self._lost: Tensor | None = None
        self._float8 = Fp8ReduceScatter()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory; called by FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Average over the ranks; called by FSDP2."""
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        exact = parts.view(RANKS, -1).double().mean(0)
        if self.way == "float8 with error feedback":
            self._with_feedback(output_tensor, input_tensor, group, op)
        elif self.way == "float8":
            self._float8(output_tensor, input_tensor, group, op)
        elif self.way == "float32":
            output_tensor.copy_(parts.view(RANKS, -1).mean(0))
        else:
            output_tensor.copy_(parts.view(RANKS, -1).flip(0).mul(1 / 3).sum(0).mul(1.5))
        if self.measures:
            self.signal += exact.square().sum().item()
            self.noise += (output_tensor - exact).square().sum().item()

    def _with_feedback(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any) -> None:
        if self._lost is not None:
            input_tensor.add_(self._lost)
        rows = input_tensor.view(RANKS, -1)
        sent = torch.empty_like(rows)
        decode_sum_(sent, to_bytes(rows)[None])
        self._lost = (rows - sent).view(-1)
        self._float8(output_tensor, input_tensor, group, op)


def train(rank: int, way: str, steps: int, seed: int) -> dict[str, Any]:
    """Train, and return the mean loss of the last steps over both ranks, and the SNR of the gradients in dB."""
    torch.manual_seed(seed)
    model = ByteGPT(depth=2, width=64, heads=2, block_size=64)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    reductions = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            reductions.append(Reduction(way))
            module.set_custom_reduce_scatter(reductions[-1])  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    data = StdlibText(block_size=64, train_windows=8 * steps, seed=1000 * seed + rank)
    data.setup("fit")
    losses, ratios = [], []
    for step, (x, y) in enumerate(data.train_dataloader()):
        measures = step % EVERY == EVERY - 1
        for reduction in reductions:
            reduction.measures = measures
            reduction.signal = reduction.noise = 0.0
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if measures and any(r.noise for r in reductions):
            ratios.append(10 * math.log10(sum(r.signal for r in reductions) / sum(r.noise for r in reductions)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    mean = torch.tensor(statistics.fmean(losses[-LAST:]))
    dist.all_reduce(mean)
    return {"loss": mean.item() / RANKS, "snr": statistics.fmean(ratios) if ratios else math.inf}


def _rank(rank: int, port: int, arguments: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    runs = {way: [train(rank, way, arguments.steps, seed) for seed in range(arguments.seeds)] for way in WAYS}
    if rank == 0:
        versions = {"torch": torch.__version__}
        page = {"date": str(date.today()), "device": "cpu", "ranks": RANKS, "versions": versions}
        page |= {"steps": arguments.steps, "last": LAST, "runs": runs}
        print(markdown(page))
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(page, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def markdown(page: dict[str, Any]) -> str:
    """Return a table of the ways, with the differences to float32 of the same seed."""
    reference = [run["loss"] for run in page["runs"]["float32"]]
    lines = [
        f"| reduction | loss, last {page['last']} of {page['steps']} steps | minus float32, by seed | SNR |",
        "|---|---|---|---|",
    ]
    for way, runs in page["runs"].items():
        losses = [run["loss"] for run in runs]
        apart = ", ".join(f"{loss - other:+.4f}" for loss, other in zip(losses, reference, strict=True))
        snr = statistics.fmean(run["snr"] for run in runs)
        shown = f"{snr:.1f} dB" if snr < 100 else "-"
        lines.append(f"| {way} | {statistics.fmean(losses):.4f} | {'-' if way == 'float32' else apart} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_reduce", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--port", type=int, default=29533)
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    multiprocessing.start_processes(_rank, (arguments.port, arguments), RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
