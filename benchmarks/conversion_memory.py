"""Measure the peak memory that conversion adds to a model of about one billion parameters.

    python -m benchmarks.conversion_memory [--layers 16]

The peak is that of the resident set. torchao is imported first, because the import is no cost of conversion.
"""

from __future__ import annotations

import argparse
import resource

import torch
import torchao.float8  # noqa: F401
from torch import nn

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.torchao.linear import coded_layers


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(layers: int, width: int = 4096) -> dict[str, float]:
    """Return the bytes of the model, and the bytes that conversion adds to the peak."""
    block = {"up": (width, 2 * width), "down": (2 * width, width)}
    model = nn.ModuleList(nn.ModuleDict({n: nn.Linear(k, m) for n, (k, m) in block.items()}) for _ in range(layers))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    plugin = FP8TorchAO()
    plugin.bind_device(torch.device("cpu"))
    plugin.convert_module(nn.Linear(16, 16))  # imports and builds what later conversions reuse
    before = peak()
    plugin.convert_module(model)
    assert len(coded_layers(model)) == 2 * layers
    return {"parameters": sum(p.numel() for p in model.parameters()), "model": size, "added": peak() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="16 layers have 1.07 billion parameters (4.3 GB)")
    row = measure(parser.parse_args().layers)
    print(
        f"{row['parameters'] / 1e9:.2f} billion parameters, {row['model'] / 1e9:.2f} GB; conversion added"
        f" {row['added'] / 1e6:.1f} MB to the peak: {row['added'] / row['model']:.3%}"
    )


if __name__ == "__main__":
    main()
