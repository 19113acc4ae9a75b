"""The ledger as Markdown: tables of what was counted, one of predicted times that says so, and a picture of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.ledger.entry import PHASES, Entry
from benchmarks.ledger.roofline import Rates, predict
from benchmarks.ledger.score import missed
from benchmarks.rivals.contenders import BASELINE, BF16_TRUE, CHUNKED, FP8_HEAD

GB = 1e9
BASES = (BASELINE, BF16_TRUE)
"""The contenders that the others are compared with, with the loss of each."""
KINDS = ("products", "bytes", "attention", "optimizer", "gaps")
"""What a predicted time is made of."""
COLOURS = {
    "products": "#3b6fb6", "attention": "#7aa6d8", "bytes, forward": "#e3b34c", "bytes, backward": "#d98032",
    "optimizer": "#9c5a8f", "gaps": "#999999",
}  # fmt: skip
HEAD = """# Ledger: {device}, one step of {shape}

Counted on a machine without a GPU: the CUDA builds of torch, Triton and Transformer Engine ran over a driver that
computes nothing. {shape}: {layers} layers, hidden {hidden}, vocabulary {vocab}, {tokens} tokens per step, AdamW.
Command: `{command}`.
"""
PREDICTED = """
## Predicted, not measured

Counted FLOPs and bytes over named rates ({label}): {rates}.
Gaps are the time between two kernels. No tails, no clocks, no host: published steps took 1.1 to 4 times as long. Ratios
of such predictions miss published ratios by {missed:.1f} % in the mean (docs/speed.md).

"""


def markdown(entries: Sequence[Entry], missing: Mapping[str, str], rates: Rates | None, command: str) -> str:
    """Return the report; ``missing``: the reason by contender."""
    first = entries[0]
    sizes = {key: first.shape[key] for key in ("layers", "hidden", "vocab")}
    text = HEAD.format(
        device=first.device, shape=first.shape["name"], tokens=f"{first.tokens:,}", command=command, **sizes
    )
    parts = [
        text,
        "\n## Counted: launches and waits\n\n",
        _launches(entries),
        "\n## Counted: bytes\n\n",
        _bytes(entries),
    ]
    parts += ["\n## Counted: matrix products, TFLOP\n\n", _products(entries)]
    parts += ["\n## Counted: memory, GB (torch's own allocator)\n\n", _memory(entries)]
    if rates is not None:
        named = ", ".join(f"{name} {_rate(name, value)}" for name, value in sorted(rates.values.items()))
        parts += [PREDICTED.format(label=rates.label, rates=named, missed=missed()), _predicted(entries, rates)]
    else:
        parts.append("\nNo rates are known for this device, so no time is predicted; `--rates FILE` gives rates.\n")
    if missing:
        parts += ["\n## Not counted\n\n", table(["contender", "why"], [[key, why] for key, why in missing.items()])]
    return "".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def _launches(entries: Sequence[Entry]) -> str:
    head = ["contender", *(f"kernels {phase}" for phase in PHASES), "products", "per block: kernels + products",
            "waits", "refused", "cudaMalloc", "graphs", "graph breaks", "host ms"]  # fmt: skip
    rows = []
    for e in entries:
        rows.append([
            e.contender, *(e.phase(phase).kernels for phase in PHASES), e.whole().products,
            f"{e.per_block('kernels'):.4g} + {e.per_block('products'):.4g}", len(e.waits), len(e.refused),
            e.mallocs, e.graphs, sum(e.graph_breaks.values()), e.host_ms,
        ])  # fmt: skip
    note = (
        "\nPer block: forward and backward of all blocks, over the number of blocks. Host ms: what Python and the"
        " libraries take to launch the step on this machine's CPU; only ratios on a quiet machine mean something.\n"
    )
    return table(head, rows) + note


def _bytes(entries: Sequence[Entry]) -> str:
    head = ["contender", "forward GB", "backward GB", "optimizer GB", "per block GB", "outside of blocks GB",
            "optimizer: bytes per parameter", "kernels of unknown bytes"]  # fmt: skip
    rows = []
    for e in entries:
        outside = sum(e.stretches[phase]["outside"].bytes for phase in PHASES[:2] if "outside" in e.stretches[phase])
        rows.append([
            e.contender, *(f"{e.phase(phase).bytes / GB:.1f}" for phase in PHASES), f"{e.per_block('bytes') / GB:.2f}",
            f"{outside / GB:.1f}", f"{e.phase('optimizer').bytes / e.parameters:.1f}", e.whole().unknown_bytes,
        ])  # fmt: skip
    note = (
        "\nRead and written by everything but matrix products and attention: inductor's estimate per Triton kernel; for"
        " eager operations and Transformer Engine's functions every argument and result once.\n"
    )
    return table(head, rows) + note


def _products(entries: Sequence[Entry]) -> str:
    formats = sorted({which for e in entries for which in e.whole().product_flops})
    rows = [
        [e.contender, *(_number(e.whole().product_flops.get(which, 0) / 1e12) for which in formats),
         _number(e.whole().attention_flops / 1e12)]
        for e in entries
    ]  # fmt: skip
    return table(["contender", *formats, "attention"], rows)


def _memory(entries: Sequence[Entry]) -> str:
    kinds = ["weights", "optimizer", "gradients", *(f"peak in {phase}" for phase in PHASES)]
    rows = [[e.contender, *(f"{e.memory[kind] / GB:.1f}" for kind in kinds), f"{e.peak / GB:.1f}"] for e in entries]
    return table(["contender", *kinds, "peak"], rows)


def _predicted(entries: Sequence[Entry], rates: Rates) -> str:
    predictions = {e.contender: predict(e, rates) for e in entries}
    rows = []
    for e in sorted(entries, key=lambda e: predictions[e.contender].total):
        p = predictions[e.contender]
        kinds = [f"{p.of(kind):.0f}" for kind in KINDS]
        loss = f", {CHUNKED}" if e.contender.endswith((CHUNKED, FP8_HEAD)) else ""
        bases = [predictions.get(f"{base}{loss}") for base in BASES]
        ratios = ["" if base is None else f"{base.total / p.total:.2f}" for base in bases]
        rows.append([e.contender, f"{p.total:.0f}", f"{e.tokens / p.total:.1f}", *ratios, *kinds])
    over = (f"over {base}, same loss" for base in BASES)
    return table(["contender", "predicted ms", "k tokens/s", *over, *KINDS], rows)


def _number(value: float) -> str:
    return f"{value:.1f}" if value else ""


def _rate(name: str, value: float) -> str:
    if name == "gap":
        return f"{value * 1e6:g} us"
    return f"{value / 1e12:g} {'TB/s' if name == 'bandwidth' else 'TFLOP/s'}"


def draw(entries: Sequence[Entry], rates: Rates, path: Path) -> None:
    """Write the picture as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    predictions = {e.contender: predict(e, rates) for e in entries}
    shown = sorted(entries, key=lambda e: predictions[e.contender].total)
    names = [e.contender for e in shown]
    figure, (time, memory) = plt.subplots(1, 2, figsize=(13, 1.2 + 0.34 * len(shown)), sharey=True, width_ratios=(3, 1))
    left = [0.0] * len(shown)
    for kind, colour in COLOURS.items():
        width = [
            sum(ms for name, ms in predictions[e.contender].milliseconds.items() if name.startswith(kind))
            for e in shown
        ]
        time.barh(names, width, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, width, strict=True)]
    for row, total in enumerate(left):
        time.text(total, row, f" {total:.0f}", va="center", fontsize=8)
    time.set_xlabel(f"PREDICTED ms per step, from counted FLOPs and bytes ({rates.label}); nothing was timed")
    time.legend(fontsize=8, loc="center right")
    time.margins(x=0.08, y=0.01)
    time.invert_yaxis()
    memory.barh(names, [e.peak / 1e9 for e in shown], color="#5f8f5f")
    for row, e in enumerate(shown):
        memory.text(e.peak / 1e9, row, f" {e.peak / 1e9:.0f}", va="center", fontsize=8)
    memory.margins(x=0.15)
    memory.set_xlabel("peak GB, counted")
    figure.suptitle(f"{shown[0].device} (null GPU), {shown[0].shape['name']}, {shown[0].tokens:,} tokens", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
