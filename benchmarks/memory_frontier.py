"""Which models fit on which card, in full size: the peak of torch's own allocator on a GPU that computes nothing.

python -m benchmarks.memory_frontier --out FOLDER [--models 8b 20b] [--precisions bf16-mixed bf16-lean]

Each case runs in a process of its own on the null GPU (see benchmarks/ledger), on a card with 1 TB, so that the peak is
known where it fits on no real card: a model of transformers, every layer checkpointed, AdamW, three steps. The peak
includes set-up, weights, gradients, optimizer state and activations; not the CUDA context and fragmentation, for which
the verdict leaves 5 % and 1 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ledger.launch import environment

MODELS: Mapping[str, tuple[int, int, int, int, int, bool]] = {
    "1b": (16, 2048, 8192, 8, 128256, True),
    "3b": (28, 3072, 8192, 8, 128256, True),
    "8b": (32, 4096, 14336, 8, 128256, False),
    "13b": (40, 5120, 13824, 40, 32000, False),
    "20b": (50, 6144, 16384, 8, 32000, False),
    "30b": (60, 6656, 17920, 52, 32000, False),
}
"""Layers, hidden, ffn, key and value heads, vocabulary, tied: shapes of Llama."""
PRECISIONS = ("bf16-mixed", "bf16-true", "bf16-master", "bf16-lean", "fp8-lean", "msamp-o2")
CARDS: Mapping[str, float] = {"RTX 4090": 25.4, "H100": 84.9, "H200": 150.1}
"""GB, as torch reports them for the product."""
GOALS = (("3b", "bf16-lean", 2048, "chunked"), ("8b", "bf16-lean", 8192, "chunked"), ("20b", "bf16-lean", 4096, None))
"""Cases that have their own length and head."""


def fits(peak: float, card: float) -> bool:
    """Return whether a peak leaves 5 % and 1 GB of a card."""
    return peak * 1.05 + 1.0 <= card


def measure(model: str, precision: str, tokens: int, head: str | None) -> dict[str, Any]:
    """Train three steps in this process; return peak and parameters."""
    import lightning as L
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_lowprec.names import TABLE, resolve

    torch.backends.cuda.enable_cudnn_sdp(False)
    layers, hidden, ffn, kv, vocabulary, tied = MODELS[model]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, head_dim=128,
        num_attention_heads=hidden // 128, num_key_value_heads=kv, tie_word_embeddings=tied, use_cache=False,
        max_position_embeddings=tokens,
    )  # fmt: skip
    row = resolve(precision) if precision in TABLE else None
    half = precision == "bf16-true" or (row is not None and "master_weights" in row.options)
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16 if half else torch.float32)
        net = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    net.train()
    parameters = sum(p.numel() for p in net.parameters())
    if row is None:
        fabric = L.Fabric(accelerator="cuda", devices=1, precision=precision)  # type: ignore[arg-type]
    else:
        options = {**row.options, **({} if head is None else {"head": head})}
        fabric = L.Fabric(accelerator="cuda", devices=1, plugins=row.plugin(**options))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=row is None or None)
    module, stepper = fabric.setup(net, optimizer)
    batch = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
    for _ in range(3):
        fabric.backward(module(input_ids=batch, labels=batch).loss)
        stepper.step()
        stepper.zero_grad()
    return {"parameters": parameters, "peak": torch.cuda.max_memory_allocated()}


def run(model: str, precision: str, tokens: int, head: str | None) -> dict[str, Any]:
    """Measure a case in a process of its own on the null GPU."""
    words = [sys.executable, "-m", "benchmarks.memory_frontier", "--case", json.dumps([model, precision, tokens, head])]
    done = subprocess.run(words, env=environment("h200_1tb"), capture_output=True, text=True, check=False)
    case = {"model": model, "precision": precision, "tokens": tokens, "head": head}
    last = done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else []
    if not last:
        return {**case, "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    return {**case, **json.loads(last[0])}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Which models fit: peak of torch's allocator on the null GPU",
        "",
        "No GPU has run this. Command: `python -m benchmarks.memory_frontier`. One sequence, every layer checkpointed,",
        "AdamW, three steps, set-up included. A card fits if 5 % of the peak and 1 GB are left.",
        "",
        f"| model | parameters, B | precision | tokens | head | peak GB | bytes per parameter | {' | '.join(CARDS)} |",
        f"|---{'|---' * (6 + len(CARDS))}|",
    ]
    for row in results:
        start = f"| {row['model']} | "
        if "error" in row:
            said = f"{row['precision']} | {row['tokens']} | {row['head'] or ''} | {row['error']}"
            lines.append(f"{start}| {said} ||{'|' * len(CARDS)}")
            continue
        peak, count = row["peak"] / 1e9, row["parameters"]
        verdicts = " | ".join("fits" if fits(peak, card) else "no" for card in CARDS.values())
        lines.append(
            f"{start}{count / 1e9:.2f} | {row['precision']} | {row['tokens']} | {row['head'] or ''} | {peak:.1f}"
            f" | {row['peak'] / count:.2f} | {verdicts} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases, and write JSON and Markdown after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_frontier", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("frontier-out"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        print(json.dumps(measure(*json.loads(options.case))))
        return
    cases = [goal for goal in GOALS if goal[0] in options.models]
    cases += [
        case
        for model in options.models
        for precision in options.precisions
        if (case := (model, precision, 4096, None)) not in cases
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for number, case in enumerate(cases, start=1):
        results.append(run(*case))
        print(f"{number} of {len(cases)}: {results[-1]}", flush=True)
        (options.out / "frontier.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.out / "frontier.md").write_text(table(results))


if __name__ == "__main__":
    main()
