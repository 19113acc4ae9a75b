"""A block of GPT-2 with its Conv1Ds, against the same block with Linears: matrix products and launches of a step."""

import gc
from collections import Counter

import lightning as L
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from benchmarks.ledger.entry import format_of
from benchmarks.ledger.recorder import recording
from lightning_lowprec import MSAMP, FP8TorchAO
from lightning_lowprec.private import transformer_engine

EMBED, LAYERS = 256, 4
PLUGINS = {
    "codes of the forward": lambda: FP8TorchAO(compile=False),
    "codes per product": lambda: FP8TorchAO(compile=False, weight_codes="per_gemm"),
    "rowwise": lambda: FP8TorchAO("rowwise", compile=False),
    "weight gradient in bf16": lambda: FP8TorchAO("rowwise_with_gw_hp", compile=False),
    "compiled": lambda: FP8TorchAO(),
    "msamp-o2": lambda: MSAMP("O2", compile=False),
}


def model(conv1d):
    off = {"bos_token_id": None, "eos_token_id": None, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
    sizes = {"vocab_size": 96, "n_embd": EMBED, "n_layer": 1, "n_head": 2, "n_positions": 64}
    made = GPT2LMHeadModel(GPT2Config(**sizes, **off))
    for module in list(made.modules()):
        for name, child in module.named_children():
            if isinstance(child, Conv1D) and not conv1d:
                setattr(module, name, nn.Linear(child.nx, child.nf))
    return made


MORE_LAUNCHES = {"compiled": -1}
"""Than Linears, per layer: torch's compiler encodes the weight of a Linear once more in the backward.
"""


def step(plugin, conv1d):
    """The numbers of launches, and of matrix products by their formats, in the third step."""
    gc.collect()
    transformer_engine.manager().reset()  # of the models of earlier tests: their scales would be renewed too
    torch._dynamo.reset()
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=plugin)
    made = model(conv1d)
    wrapped, optimizer = fabric.setup(made, torch.optim.AdamW(made.parameters(), fused=True))
    tokens = torch.zeros(2, 64, dtype=torch.int64, device=fabric.device)
    for _ in range(3):
        with recording() as log:
            fabric.backward(wrapped(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
    return log.count("kernel"), Counter(map(format_of, log.of("gemm")))


@pytest.mark.filterwarnings("ignore:.*are expected to be slower in FP8")
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.rehearsed if way == "compiled" else ()) for way in PLUGINS]
)
def test_products_and_launches_are_those_of_linears(way):
    (launches, products), (expected, of_linears) = (step(PLUGINS[way](), conv1d) for conv1d in (True, False))
    assert products == of_linears
    assert sum(products[name] for name in products if name.startswith("float8")) >= 2 * LAYERS
    assert launches - expected == LAYERS * MORE_LAUNCHES.get(way, 0)
