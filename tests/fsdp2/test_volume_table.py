"""The table of docs/fsdp2.md is what the formula gives, for what the plan of a real Llama says."""

import re
from pathlib import Path

import pytest
import torch

from lightning_lowprec.tools.planning.costs import Weights, step

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
RUNS = [(8, 1), (64, 1), (64, 8), (512, 1), (512, 64)]


def rows():
    for gpus, copies in RUNS:
        for precision, (blocks, dtype) in PRECISIONS.items():
            v = step(blocks, ROOT, shards=gpus // copies, copies=copies, param_dtype=dtype)
            parts = (v.all_gather_forward + v.all_gather_backward, v.reduce_scatter, v.all_reduce, v.total)
            cells = " | ".join(f"{part / 1e9:.1f}" for part in parts)
            yield f"| {gpus} | {gpus // copies} x {copies} | {precision} | {cells} |"


def test_the_table():
    table = DOCS.read_text().split("<!-- volume")[1].split("<!-- /volume")[0]
    assert [line for line in table.splitlines() if re.match(r"\| \d", line)] == list(rows())


LINKS = {  # bytes per second and GPU; what is sent there per parameter, for each byte of a gradient, and for the gather
    "NVLink": (400e9, 1, 2),
    "InfiniBand, 400 Gb/s per GPU": (50e9, 1, 2),
    "PCIe 4.0 x16": (25e9, 1, 2),
    "Ethernet, 100 Gb/s per node of 8 GPUs": (12.5e9 / 8, 1, 2),
    'the same, `replicate="nodes"`, 8 shards': (12.5e9 / 8, 2 / 8, 0),
}


def test_the_table_of_tokens_that_hide_gradients():
    """4 P T / F seconds of backward are as long as the bytes take."""
    lines = []
    for link, (bandwidth, times, gathered) in LINKS.items():
        tokens = [(gathered + times * size) * 400e12 / (4 * bandwidth) for size in (4, 2)]
        cells = " | ".join(f"{t:,.0f}" for t in tokens)
        lines.append(f"| {link} | {bandwidth / 1e9:.3g} GB/s | {cells} |")
    table = DOCS.read_text().split("<!-- hidden")[1].split("<!-- /hidden")[0]
    assert table.splitlines()[3:] == lines


def test_the_numbers_of_parameters_in_the_text():
    text = DOCS.read_text().replace("\n", " ")
    assert f"{HIGH.total + ROOT.total:,}".replace(",", " ") in text
    assert f"{LINEARS:,}".replace(",", " ") in text


def test_the_shape_is_that_of_transformers_llama():
    transformers = pytest.importorskip("transformers")
    from lightning_lowprec.conversion.plan import make_plan

    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        num_hidden_layers=LAYERS,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == HIGH.total + ROOT.total
    converted = [row for row in make_plan(model).rows if row.kept_because is None]
    assert sum(row.in_features * row.out_features for row in converted) == LINEARS
    assert len(converted) == PRECISIONS["fp8-hybrid"][0].scales
    in_root = [p.numel() for fqn, p in model.named_parameters() if ".layers." not in fqn]
    assert sum(in_root) == ROOT.total
