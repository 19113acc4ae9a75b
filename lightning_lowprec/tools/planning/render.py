"""A plan and its costs as text, for a terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_lowprec.conversion.gains import SOURCE
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.conversion.plan_table import grouped, verdict_with_gain
from lightning_lowprec.tools.planning.costs import Bytes, Flops
from lightning_lowprec.tools.planning.per_rank import Rank
from lightning_lowprec.tools.table import format_table

GATHER_NOTE = (
    "all-gather: all weights once, in the dtype in which strategy='fsdp2' gathers them (tensorwise FP8: one byte per"
    " converted weight). Under Lightning's own FSDP2 strategy, bf16-mixed gathers 4 bytes. docs/many-machines.md has"
    " the bytes of a step. Gradients of 0: each is used and freed during the backward pass (docs/memory.md)."
)
RANK_NOTE = (
    "state: weights, gradients, masters and moments of one rank, and the float8 codes that it keeps of its shards until"
    " the next step. in flight: at most so much more, for gathered weights and gradients on their way; activations come"
    " on top. The last three columns: what a rank sends in one step of one micro-batch, in rings."
)


def text(
    origin: str,
    plan: Plan,
    flops: Flops,
    sizes: Sequence[Bytes],
    ranks: Sequence[Rank] = (),
    *,
    forward: str = "",
    markdown: bool = False,
    all_rows: bool = False,
) -> str:
    """Return a report on a plan.

    Args:
        origin: the source of the model, in words.
        plan: the plan.
        flops: the plan's FLOPs.
        sizes: the model's bytes, one row per precision.
        ranks: the bytes of one rank under FSDP2, one row per precision; empty: not asked for.
        forward: a line about the FLOPs of a forward; empty: no forward is known.
        markdown: write Markdown.
        all_rows: one row per layer, not one per kind of block.
    """
    rows = [(row.fqn, row) for row in plan.all_rows] if all_rows else grouped(plan.all_rows)
    cells = [(name or "(the model)", row.shape, verdict_with_gain(row, plan.format)) for name, row in rows]
    return "\n\n".join(
        [
            f"{'# ' if markdown else ''}{origin}: {plan.summary()}",
            "\n".join(format_table([("layer", "in -> out", "verdict"), *cells], right=[1], markdown=markdown)),
            "\n".join(f"{'- ' if markdown else ''}{cost}" for cost in _costs(plan, flops, forward)),
            "\n".join(format_table(_sizes(sizes), right=range(1, 6), markdown=markdown)),
            GATHER_NOTE,
            *_of_ranks(ranks, markdown),
        ]
    )


def _of_ranks(ranks: Sequence[Rank], markdown: bool) -> list[str]:
    if not ranks:
        return []
    lines: list[tuple[str, ...]] = [("one rank", "state", "in flight", "all-gather", "reduce-scatter", "all-reduce")]
    for rank in ranks:
        gathers = rank.sent.all_gather_forward + rank.sent.all_gather_backward
        sizes = (rank.state, rank.in_flight, gathers, rank.sent.reduce_scatter, rank.sent.all_reduce)
        lines.append((rank.precision, *(_size(size) if size else "-" for size in sizes)))
    return ["\n".join(format_table(lines, right=range(1, 6), markdown=markdown)), RANK_NOTE]


def _costs(plan: Plan, flops: Flops, forward: str) -> list[str]:
    convolutions = sum(not row.per_token for row in plan.others)
    counted, missing, of = [f"{flops.high_precision:.3g} kept"], list[str](), ""
    if flops.attention:
        counted.append(f"{flops.attention:.3g} attention")
    else:
        missing, of = ["attention", "products of bare parameters"], " of the linear layers"
    if convolutions:
        missing, of = [f"{convolutions} convolutions", *missing], " of the linear layers"
    if missing:
        counted.append(f"{', '.join(missing)} not known and not counted")
    lines = [
        f"matrix FLOPs per token{of}: {flops.fp8_share:.1%} in {plan.format}"
        f" ({flops.fp8:.3g} {plan.format}, {', '.join(counted)})",
        *filter(None, [forward]),
    ]
    if plan.format != "FP8":
        return [*lines, f"gains per layer: not known for {plan.format}"]
    slow = len(plan.below_break_even())
    if slow:
        lines.append(f"{slow} converted layers are expected to be slower than in bf16; `--min-gain=auto` keeps them")
    lines.append(f"gains per layer: {SOURCE}, nearest shape; coarse")
    return lines


def _sizes(rows: Sequence[Bytes]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("with AdamW", "weights", "gradients", "moments", "together", "all-gather")]
    for row in rows:
        sizes = [_size(value) for value in (row.weights, row.gradients, row.optimizer, row.state)]
        lines.append((row.precision, *sizes, _size(row.gathered) if row.gathered else "-"))
    return lines


def _size(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"
