"""Print how set-up and a step grow with the number of small blocks, on a CPU.

    python -m benchmarks.scaling                                       # 16, 64, 256 and 1,024 blocks: ten minutes
    python -m benchmarks.scaling --names bf16-lean --blocks 64 256

Two costs of each part: milliseconds of processor time, which a busy machine disturbs, and calls of Python and C
functions, which are the same everywhere. Behind both stands the exponent over the two largest numbers of blocks: 1 is
linear, 2 quadratic. A block is a LayerNorm and two Linears of width 32; AdamW steps.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from benchmarks.hook_overhead import Calls

BLOCKS = (16, 64, 256, 1024)
NAMES = (
    "bf16-mixed", "fp8-hybrid", "fp8-rowwise", "int8-mixed", "half-auto", "fp16-master", "bf16-remainder", "bf16-sr",
    "fp8-hybrid-remainder", "bf16-lean", "fp8-lean", "msamp-o1", "msamp-o2", "msamp-o3",
)  # fmt: skip
PARTS = ("set-up", "forward", "backward", "step")
WIDTH, ROWS, STEPS = 32, 32, 2
Costs = dict[str, float]
"""By part."""
Measure = Callable[[Callable[[], Any]], tuple[Any, float]]
"""Runs a function; returns its result and its cost."""


class Block(nn.Module):
    """A residual block of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def milliseconds(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of ``run``, and the milliseconds of processor time that it took."""
    start = time.process_time()
    result = run()
    return result, 1e3 * (time.process_time() - start)


def calls(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of ``run``, and the number of Python and C functions that it called."""
    with Calls(of_c=True) as counted:
        result = run()
    return result, counted.count


def costs(name: str, blocks: int, measure: Measure) -> Costs:
    """Return what set-up, and each part of the last step, cost under a precision."""
    model = nn.Sequential(*(Block() for _ in range(blocks)))

    def set_up() -> Any:
        fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)  # type: ignore[arg-type]
        module = fabric.setup_module(model)
        return fabric, module, fabric.setup_optimizers(torch.optim.AdamW(module.parameters()))

    (fabric, module, optimizer), first = measure(set_up)
    found = {PARTS[0]: first}

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):  # the first one makes the state
        loss, found["forward"] = measure(lambda: module(torch.ones(ROWS, WIDTH)).float().pow(2).mean())
        _, found["backward"] = measure(lambda: fabric.backward(loss))  # noqa: B023
        _, found["step"] = measure(step)
    return found


def exponent(by_blocks: Mapping[int, float]) -> float:
    """Return the exponent over the two largest numbers of blocks."""
    few, many = sorted(by_blocks)[-2:]
    return math.log(by_blocks[many] / by_blocks[few]) / math.log(many / few)


def row(name: str, blocks: Sequence[int], measure: Measure) -> str:
    """Return a line: the costs of every part by number of blocks, and the exponent."""
    by_blocks = {count: costs(name, count, measure) for count in blocks}
    cells = []
    for part in PARTS:
        of_part = {count: found[part] for count, found in by_blocks.items()}
        cells.append(" ".join(f"{cost:,.0f}" for cost in of_part.values()) + f" **{exponent(of_part):.2f}**")
    return f"| {name} | {measure.__name__} | " + " | ".join(cells) + " |"  # type: ignore[attr-defined]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--blocks", nargs="+", type=int, default=BLOCKS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| precision | cost | " + " | ".join(PARTS) + " |\n" + "|---" * (2 + len(PARTS)) + "|")
    for name in chosen.names:
        costs(name, 2, milliseconds)  # imports
        for measure in (milliseconds, calls):
            print(row(name, chosen.blocks, measure), flush=True)


if __name__ == "__main__":
    main()
