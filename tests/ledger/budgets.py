"""What a step may ask of the GPU: counted figures, kept in one place. A figure that falls is written down here.

The model is the ledger's 8B-shaped stack at full size: 16 layers, 8,192 tokens, vocabulary 128,256, an H200.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """The most that is allowed, and the figure that this one replaced."""

    most: float
    before: float | None = None


BLOCK_GB = {
    "lightning bf16-mixed, compiled": Budget(7.6),
    "lightning bf16-true, compiled": Budget(4.0),
    "ours fp8-hybrid": Budget(11.8, before=8.7),
    "ours fp8-hybrid-remainder": Budget(8.1, before=6.3),
    "ours fp8-rowwise": Budget(12.3, before=13.9),
    "ours fp8-rowwise-gw-hp": Budget(10.7, before=11.5),
    "ours fp8-hybrid-te": Budget(14.6),
    "ours fp8-hybrid-te, blocks compiled": Budget(12.1, before=12.43),
    "ours msamp-o2": Budget(10.9, before=11.8),
}
"""GB that one block reads and writes in forward and backward, matrix products and attention left out.

Before, the first block encoded the weights of all blocks, once per step: 37 GB, which the figure of a block left out.
"""

OPTIMIZER_BYTES = {
    "lightning bf16-mixed, compiled": Budget(28.1),
    "ours fp8-hybrid": Budget(28.1),
    "ours fp8-hybrid-te": Budget(28.1),
    "ours bf16-master": Budget(28.1, before=48.1),
    "ours bf16-remainder": Budget(26.1, before=110.1),
    "ours bf16-sr": Budget(22.1, before=156.1),
    "ours msamp-o2": Budget(19.6, before=420.0),
}
"""Bytes per parameter that the optimizer's step reads and writes: weights, gradients and state. Fused AdamW: 28."""

PEAK_GB = {
    "lightning bf16-mixed, compiled": Budget(95.9),
    "ours fp8-hybrid": Budget(82.0, before=89.0),
    "ours fp8-hybrid-remainder, fp8 head": Budget(70.2, before=77.4),
    "ours fp8-hybrid-te": Budget(96.7),
    "ours bf16-master": Budget(95.8, before=100.1),
    "ours bf16-remainder": Budget(86.8, before=100.1),
    "ours bf16-sr": Budget(77.7, before=100.1),
    "ours msamp-o2": Budget(63.7, before=67.5),
}
"""The most GB that torch's allocator held during a step."""

PYTHON_CALLS = {
    "lightning bf16-mixed, compiled": Budget(6_500),
    "ours fp8-hybrid": Budget(12_100),
}
"""Python functions that the host calls in a step; the same torchao code by hand calls 12,736."""

OPTIMIZER_CALLS = {
    "fp32": Budget(260, before=3_768),
    "remainder": Budget(250, before=3_373),
    "stochastic": Budget(250, before=3_376),
    "8bit": Budget(300, before=3_993),
}
"""Python functions that the host calls in an AdamW step of 64 half-precision parameters, by what is kept between steps.

torch's fused AdamW of float32 parameters calls 195.
"""

OPTIMIZER_CALLS_IN_C = {
    "fp32": Budget(830, before=1_258),
    "remainder": Budget(555, before=983),
    "stochastic": Budget(555, before=985),
    "8bit": Budget(670, before=1_100),
}
"""The same with functions of C; torch's fused AdamW calls 811."""

HEAD_PEAK_GB = {
    ("chunked", "torch.bfloat16"): Budget(3.22),
    ("chunked", "torch.float32"): Budget(3.55),
    ("fp8", "torch.bfloat16"): Budget(3.03),
    ("fp8", "torch.float32"): Budget(3.29),
}
"""GB that head and loss of the 8B shape hold at their peak beyond their inputs, by loss and dtype of the weight."""

ALL_LOGITS_GB, ALL_LOGITS_PEAK_GB = 42.0, 12.6
"""GB that torch's own head and cross-entropy move and hold there, bf16 weights and their gradient included."""

HEAD_GB = {
    ("chunked", "torch.bfloat16"): Budget(9.5),
    ("chunked", "torch.float32"): Budget(9.5, before=13.9),
    ("fp8", "torch.bfloat16"): Budget(8.8, before=12.2),
    ("fp8", "torch.float32"): Budget(10.9, before=16.8),
}
"""GB that head and loss of the 8B shape read and write outside of matrix products, by loss and dtype of the weight."""

WAITS = {
    "16-mixed": Budget(1),
    "bf16-mixed": Budget(0),
    "bf16-8bit": Budget(0),
    "bf16-remainder": Budget(0),
    "fp8-hybrid": Budget(0, before=2),
    "fp8-hybrid, LoRA": Budget(0, before=2),
    "fp8-hybrid, transformers' checkpoints": Budget(0, before=2),
    "fp8-hybrid, skip_nonfinite=True": Budget(1, before=3),
    "fp8-hybrid-8bit": Budget(0, before=2),
    "fp8-hybrid-fp16": Budget(1, before=3),
    "fp8-hybrid-remainder": Budget(0, before=2),
    "fp8-rowwise": Budget(0, before=2),
    "fp8-block": Budget(0),
    "fp8-hybrid-te": Budget(0),
    "int8-mixed": Budget(0),
    "msamp-o2": Budget(0),
}
"""How often the host waits for the GPU in an optimizer step of two micro-batches, with clipping.

A Llama of transformers under the Trainer, called with tokens and labels. The first two rows are Lightning's own names.
Before, models with compiled blocks asked in every forward whether their tokens are one sequence.
"""


@dataclass(frozen=True, kw_only=True)
class TrainedBudget:
    """The most that a step of a model under the Trainer asks for."""

    kernels: int
    """Launches of kernels and of matrix products."""
    graphs: int
    block_gb: float
    outside_gb: float
    """What is in no block: embedding, last norm, head and loss."""
    peak_gb: float


def _trained(*row: float) -> TrainedBudget:
    kernels, graphs, block, outside, peak = row
    return TrainedBudget(kernels=int(kernels), graphs=int(graphs), block_gb=block, outside_gb=outside, peak_gb=peak)


TRAINED = {
    ("llama", "bf16-mixed"): _trained(2596, 0, 23.15, 55.3, 124.0),
    ("llama", "fp8-hybrid"): _trained(1908, 1, 11.63, 55.3, 98.2),
    ("llama", "fp8-hybrid-8bit"): _trained(1629, 1, 7.93, 47.6, 54.7),
    ("gpt2", "fp8-hybrid"): _trained(1003, 1, 3.62, 19.8, 16.0),
    ("gpt2", "fp8-hybrid-8bit"): _trained(1014, 1, 2.89, 18.0, 11.8),
    ("vit", "fp8-hybrid"): _trained(1590, 1, 3.27, 0.8, 6.2),
    ("vit", "fp8-hybrid-8bit"): _trained(1582, 1, 2.71, 0.9, 4.5),
    ("encoder", "fp8-hybrid"): _trained(443, 2, 2.33, 0.4, 3.0),
    ("encoder", "fp8-hybrid-8bit"): _trained(434, 2, 2.18, 0.4, 2.3),
    ("mixture", "fp8-hybrid"): _trained(476, 1, 40.96, 17.5, 57.8),
    ("mixture", "fp8-hybrid-8bit"): _trained(330, 1, 22.33, 15.3, 26.1),
}
"""By model (`benchmarks/ledger/trained.py`, Llama with the sizes of the 8B stack) and name; torch's fused AdamW."""
