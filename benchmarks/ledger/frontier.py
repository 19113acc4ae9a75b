"""The peak of torch's own allocator for whole models on one card, on a GPU that computes nothing.

    python -m benchmarks.ledger.launch .venv-te/bin/python -m benchmarks.ledger.frontier 28b:remainder8 20b:remainder

A case is a size of Llama and a form of masters, with moments of 8 bits and updates during the backward pass. One
sequence of 4,096 tokens (a third part of the case changes this: ``28b:remainder8:2048``), every layer checkpointed,
AdamW, three steps, set-up included. Each case is a line of the table of docs/memory.md.
"""

from __future__ import annotations

import gc
import sys

import lightning as L
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_lowprec import HalfMixed, MasterConfig

MODELS = {
    "1b": (16, 2048, 8192, 8, 32000),
    "20b": (50, 6144, 16384, 8, 32000),
    "27b": (57, 6656, 17920, 13, 32000),
    "28b": (59, 6656, 17920, 13, 32000),
}
"""Layers, hidden, ffn, key and value heads, vocabulary."""
H200 = 150.1  # GB, as torch reports them


def measure(model: str, form: str, tokens: int) -> tuple[int, int]:
    """Train three steps; return the number of parameters and the peak in bytes."""
    layers, hidden, ffn, kv, vocabulary = MODELS[model]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, head_dim=128,
        num_attention_heads=hidden // 128, num_key_value_heads=kv, use_cache=False, max_position_embeddings=tokens,
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        net = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    masters = MasterConfig(form=form, moments="8bit", update="backward")  # type: ignore[arg-type]
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=HalfMixed("bf16", master_weights=masters, head="chunked"))
    module, optimizer = fabric.setup(net.train(), torch.optim.AdamW(net.parameters(), lr=1e-4))
    batch = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
    for _ in range(3):
        fabric.backward(module(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return sum(p.numel() for p in net.parameters()), torch.cuda.max_memory_allocated()


def main(cases: list[str]) -> None:
    """Print a row per case."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # the null GPU has no cuDNN
    print("| model | parameters, B | form | tokens | peak GB | bytes per parameter | left on an H200 |")
    print("|---" * 7 + "|")
    for case in cases:
        model, form, *rest = case.split(":")
        tokens = int(rest[0]) if rest else 4096
        count, peak = measure(model, form, tokens)
        left = f"{H200 - peak / 1e9:.1f} GB"
        print(
            f"| {model} | {count / 1e9:.2f} | {form} | {tokens} | {peak / 1e9:.1f} | {peak / count:.2f} | {left} |",
            flush=True,
        )
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
