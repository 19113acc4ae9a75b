"""Print what emulated FP8 costs on a CPU: the CPU time of a training step of the demo's GPT, beside float32 and bf16.

OMP_NUM_THREADS=1 python -m benchmarks.emulation
"""

from collections.abc import Callable

import lightning as L
import torch
from torch.nn.functional import cross_entropy

from benchmarks.host_overhead import least_ms
from lightning_lowprec.tools.demo import ByteGPT

NAMES = ("32-true", "bf16-mixed", "fp8-hybrid")
WARM_STEPS = 2


def stepping(name: str) -> Callable[[], None]:
    """Return a function that trains a step of 16 sequences of 128 bytes under a precision."""
    torch.manual_seed(0)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)
    model = ByteGPT()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.randint(256, (16, 129))

    def step() -> None:
        optimizer.zero_grad()
        fabric.backward(cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()))
        optimizer.step()

    return step


def main(repeats: int = 20) -> None:
    """Print a line per precision: the CPU time of a step, and how many times that of the first it is."""
    steps = [stepping(name) for name in NAMES]
    for step in steps * WARM_STEPS:
        step()
    least = least_ms(steps, repeats)
    for name, milliseconds in zip(NAMES, least, strict=True):
        print(f"{name:<12}{milliseconds:8.0f} ms of CPU time{milliseconds / least[0]:8.2f} times {NAMES[0]}")


if __name__ == "__main__":
    main()
