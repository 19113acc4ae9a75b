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
class LlamaBudget:
    """The most that a step of a Llama of transformers under the Trainer asks for."""

    kernels: int
    """Launches of kernels and of matrix products."""
    block_gb: float
    outside_gb: float
    """What is in no block: embedding, last norm, head and loss."""
    peak_gb: float


LLAMA = {
    "bf16-mixed": LlamaBudget(kernels=2596, block_gb=23.15, outside_gb=55.3, peak_gb=124.0),
    "fp8-hybrid": LlamaBudget(kernels=1908, block_gb=11.63, outside_gb=55.3, peak_gb=98.2),
    "fp8-hybrid-8bit": LlamaBudget(kernels=1629, block_gb=7.93, outside_gb=47.6, peak_gb=54.7),
}
"""By name; the sizes of the 8B stack, called with tokens and labels, torch's fused AdamW."""
