"""Bytes per step: the formula, and the table of docs/fsdp2.md.

tests/ledger/test_worlds.py counts what a rank sends.
"""

import re
from pathlib import Path

import torch

from lightning_lowprec.tools.planning.costs import Weights, all_reduce, gathered, step, weights_of


def test_frozen_weights_are_gathered_and_have_no_gradients():
    blocks = Weights(fp8=100, other=20, frozen=100)
    volume = step(blocks, Weights(), shards=4, param_dtype=torch.bfloat16)
    assert volume.all_gather_forward == volume.all_gather_backward == (100 + 40) * 3 / 4
    assert volume.reduce_scatter == 4 * 20 * 3 / 4
    assert gathered(blocks, torch.float32) == 180


def test_the_weights_of_groups_with_padding():
    model = torch.nn.ModuleDict({"body": torch.nn.ModuleList(torch.nn.Linear(8, 6) for _ in range(2))})
    model["head"] = torch.nn.Linear(6, 5, bias=False).requires_grad_(False)
    model["body"].append(torch.nn.Linear(1, 1, bias=False))
    groups = weights_of(model, ["body.0"], blocks=["body.0", "body.1"], shards=4, tile=0)
    assert groups["body.0"] == Weights(fp8=8 * 8, scales=1, other=8), "6 rows in 4 parts of 2"
    assert groups["body.1"] == Weights(other=8 * 8 + 8)
    assert groups[""] == Weights(other=8 * 6 + 4, frozen=8 * 6)
    tiled = weights_of(model, ["body.0"], blocks=["body.0"], shards=1, tile=4)
    assert tiled["body.0"] == Weights(fp8=8 * 6, scales=2 * 2, other=6), "6 rows and 8 columns of tiles of 4"


DOCS = Path(__file__).parents[2] / "docs" / "fsdp2.md"
HIDDEN, INNER, KEYS, VOCABULARY, LAYERS = 4096, 14336, 1024, 128256, 32
LINEARS = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER)
NORMS = LAYERS * 2 * HIDDEN
ROOT = Weights(other=2 * VOCABULARY * HIDDEN + HIDDEN)
HIGH = Weights(other=LINEARS + NORMS)
PRECISIONS = {
    "32-true": (HIGH, torch.float32),
    "bf16-mixed": (HIGH, torch.bfloat16),
    "fp8-hybrid": (Weights(fp8=LINEARS, scales=7 * LAYERS, other=NORMS), torch.bfloat16),
}
RUNS = [(8, 1), (512, 1), (512, 64)]


def rows():
    for gpus, copies in RUNS:
        for precision, (blocks, dtype) in PRECISIONS.items():
            v = step(blocks, ROOT, shards=gpus // copies, param_dtype=dtype)
            between_copies = all_reduce(4 * (blocks.total + ROOT.total) * copies / gpus, copies)
            parts = (v.all_gather_forward + v.all_gather_backward, v.reduce_scatter, between_copies)
            cells = " | ".join(f"{part / 1e9:.1f}" for part in (*parts, sum(parts) + v.scales))
            yield f"| {gpus} | {gpus // copies} x {copies} | {precision} | {cells} |"


def test_the_table():
    table = DOCS.read_text().split("<!-- volume")[1].split("<!-- /volume")[0]
    assert [line for line in table.splitlines() if re.match(r"\| \d", line)] == list(rows())
