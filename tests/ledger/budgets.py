"""The most that a step may ask of the GPU: counted figures, in one place. A figure that falls is written down here.

The model is the ledger's 8B-shaped stack at full size: 16 layers, 8,192 tokens, vocabulary 128,256, an H200.
"""

from dataclasses import dataclass

BLOCK_GB = {
    "lightning bf16-mixed, compiled": 7.6,
    "lightning bf16-true, compiled": 4.0,
    "ours fp8-hybrid": 9.3,
    "ours fp8-hybrid-remainder": 6.7,
    "ours fp8-rowwise": 12.3,
    "ours fp8-rowwise-gw-hp": 10.7,
    "ours fp8-block": 12.4,
    "ours fp8-hybrid-te": 14.6,
    "ours fp8-hybrid-te, blocks compiled": 12.1,
    "ours msamp-o2": 10.4,
}
"""GB that one block reads and writes in forward and backward, matrix products and attention left out."""

OPTIMIZER_BYTES = {
    "lightning bf16-mixed, compiled": 28.1,
    "ours fp8-hybrid": 28.1,
    "ours fp8-hybrid-te": 28.1,
    "ours bf16-master": 28.1,
    "ours bf16-remainder": 26.1,
    "ours bf16-sr": 22.1,
    "ours msamp-o2": 19.6,
}
"""Bytes per parameter that the optimizer's step reads and writes: weights, gradients and state. Fused AdamW: 28."""

PEAK_GB = {
    "lightning bf16-mixed, compiled": 95.9,
    "ours fp8-hybrid": 86.5,
    "ours fp8-hybrid-remainder, fp8 head": 73.7,
    "ours fp8-hybrid-te": 96.7,
    "ours bf16-master": 95.8,
    "ours bf16-remainder": 86.8,
    "ours bf16-sr": 77.7,
    "ours msamp-o2": 64.8,
}
"""The most GB that torch's allocator held during a step."""

PYTHON_CALLS = {"lightning bf16-mixed, compiled": 6_500, "ours fp8-hybrid": 11_700}
"""Python functions that the host calls in a step; the same torchao code by hand calls 12,736."""

OPTIMIZER_CALLS = {"fp32": 130, "remainder": 115, "stochastic": 115, "8bit": 170}
"""Python functions that the host calls in an AdamW step of 64 half-precision parameters, by what is kept between steps.

torch's fused AdamW of float32 parameters calls 195.
"""

OPTIMIZER_CALLS_IN_C = {"fp32": 640, "remainder": 365, "stochastic": 365, "8bit": 480}
"""The same with functions of C; torch's fused AdamW calls 811."""

HEAD_PEAK_GB = {
    ("chunked", "torch.bfloat16"): 3.22,
    ("chunked", "torch.float32"): 3.55,
    ("fp8", "torch.bfloat16"): 3.03,
    ("fp8", "torch.float32"): 3.29,
}
"""GB that head and loss of the 8B shape hold at their peak beyond their inputs, by loss and dtype of the weight."""

ALL_LOGITS_GB, ALL_LOGITS_PEAK_GB = 42.0, 12.6
"""GB that torch's own head and cross-entropy move and hold there, bf16 weights and their gradient included."""

HEAD_GB = {
    ("chunked", "torch.bfloat16"): 9.5,
    ("chunked", "torch.float32"): 9.5,
    ("fp8", "torch.bfloat16"): 8.8,
    ("fp8", "torch.float32"): 10.9,
}
"""GB that head and loss of the 8B shape read and write outside of matrix products, by loss and dtype of the weight."""

WAITS = {
    "16-mixed": 1,
    "bf16-mixed": 0,
    "bf16-8bit": 0,
    "bf16-remainder": 0,
    "fp8-hybrid": 0,
    "fp8-hybrid, LoRA": 0,
    "fp8-hybrid, transformers' checkpoints": 0,
    "fp8-hybrid, skip_nonfinite=True": 1,
    "fp8-hybrid-te, skip_nonfinite=True": 1,
    "bf16-remainder, skip_nonfinite=True": 1,
    "fp8-hybrid-8bit": 0,
    "fp8-hybrid-fp16": 1,
    "fp8-hybrid-remainder": 0,
    "fp8-rowwise": 0,
    "fp8-block": 0,
    "fp8-hybrid-te": 0,
    "int8-mixed": 0,
    "msamp-o2": 0,
}
"""How often the host waits for the GPU in an optimizer step of two micro-batches, with clipping.

A Llama of transformers under the Trainer, called with tokens and labels. The first two rows are Lightning's own names.
"""


@dataclass(frozen=True)
class TrainedBudget:
    kernels: int
    """Launches of kernels and of matrix products."""
    graphs: int
    block_gb: float
    outside_gb: float
    """What is in no block: embedding, last norm, head and loss."""
    peak_gb: float


TRAINED = {
    ("llama", "bf16-mixed"): TrainedBudget(2596, 0, 23.15, 55.3, 124.0),
    ("llama", "fp8-hybrid"): TrainedBudget(1700, 1, 9.19, 55.3, 102.8),
    ("llama", "fp8-hybrid-8bit"): TrainedBudget(1532, 1, 6.65, 47.6, 56.1),
    ("gpt2", "fp8-hybrid"): TrainedBudget(955, 1, 2.92, 19.8, 16.0),
    ("gpt2", "fp8-hybrid-8bit"): TrainedBudget(988, 1, 2.33, 18.0, 11.8),
    ("vit", "fp8-hybrid"): TrainedBudget(1494, 1, 2.59, 0.8, 6.6),
    ("vit", "fp8-hybrid-8bit"): TrainedBudget(1508, 1, 2.03, 0.9, 4.6),
    ("encoder", "fp8-hybrid"): TrainedBudget(419, 2, 2.04, 0.4, 3.0),
    ("encoder", "fp8-hybrid-8bit"): TrainedBudget(422, 2, 1.93, 0.4, 2.4),
    ("mixture", "fp8-hybrid"): TrainedBudget(462, 1, 40.40, 17.5, 58.0),
    ("mixture", "fp8-hybrid-8bit"): TrainedBudget(324, 1, 21.95, 15.3, 26.1),
}
"""By model (`benchmarks/ledger/trained.py`, Llama with the sizes of the 8B stack) and name; torch's fused AdamW."""
