r"""The memory of a whole Llama on one H200, by torch's own allocator on a GPU that computes nothing.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True .venv-te/bin/python -m benchmarks.ledger.launch \
        .venv-te/bin/python -m benchmarks.ledger.frontier 28b:remainder8

A case is a size and a form of masters, with moments of 8 bits and updates during the backward pass: bf16 weights, one
sequence of 4,096 tokens, every layer checkpointed, AdamW, three steps, set-up included. Each is a row of a table.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_lowprec import HalfMixed, MasterConfig

MODELS = {"1b": (16, 2048, 8192, 8), "20b": (50, 6144, 16384, 8), "28b": (59, 6656, 17920, 13)}
"""Layers, hidden, ffn, key and value heads; the vocabulary has 32,000 words."""
TOKENS = 4096


def measure(model: str, form: Any) -> tuple[int, int, int]:
    """Return the number of parameters, and the largest memory in bytes: in use, and taken from the device."""
    layers, hidden, ffn, kv = MODELS[model]
    config = LlamaConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, head_dim=128,
        num_attention_heads=hidden // 128, num_key_value_heads=kv, use_cache=False, max_position_embeddings=TOKENS,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        net = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    masters = MasterConfig(form=form, moments="8bit", update="backward")
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=HalfMixed("bf16", master_weights=masters, head="chunked"))
    module, optimizer = fabric.setup(net.train(), torch.optim.AdamW(net.parameters(), lr=1e-4))
    batch = torch.zeros(1, TOKENS, dtype=torch.int64, device="cuda")
    for _ in range(3):
        fabric.backward(module(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    used, taken = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return sum(parameter.numel() for parameter in net.parameters()), used, taken


if __name__ == "__main__":
    torch.backends.cuda.enable_cudnn_sdp(False)  # the null GPU has no cuDNN
    size = torch.cuda.get_device_properties(0).total_memory
    print("| model | parameters, B | masters | GB in use | GB taken from the device | of |")
    print("|---" * 6 + "|")
    for name, form in (case.split(":") for case in sys.argv[1:]):
        count, used, taken = measure(name, form)
        memory = f"{used / 1e9:.1f} | {taken / 1e9:.1f} | {size / 1e9:.1f}"
        print(f"| {name} | {count / 1e9:.2f} | {form} | {memory} |", flush=True)
