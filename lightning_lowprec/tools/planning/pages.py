"""The page that ``lowprec plan`` prints."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from lightning_lowprec.conversion.gains import SOURCE
from lightning_lowprec.conversion.plan import Plan, grouped, verdict_with_gain
from lightning_lowprec.messages import in_units
from lightning_lowprec.tools.output import folded, format_table
from lightning_lowprec.tools.planning.costs import Bytes, Flops, Rank

GATHER_NOTE = (
    "all-gather: all weights once, as strategy='fsdp2' gathers them (a scale per tensor or tile: one byte per converted"
    " weight). Under Lightning's own FSDP2 strategy, bf16-mixed gathers 4 bytes. docs/fsdp2.md has"
    " the bytes of a step."
)
HOST_NOTE = "Weights that do not train keep their float32 values in host memory"
RANK_NOTE = (
    "state: weights, gradients, masters and moments of one rank, and the codes that it keeps of its shards until"
    " the next step. in flight: at most so much more, for gathered weights and gradients on their way; activations come"
    " on top. The last three columns: what a rank sends in one step of one micro-batch, in rings."
)


class Table(NamedTuple):
    """Rows of cells, the header first."""

    rows: Sequence[Sequence[str]]
    words: Collection[int] = (0,)
    """The columns that are aligned to the left; numbers stand in the others."""


def page(parts: Sequence[Table | Sequence[str]]) -> str:
    """Return tables and groups of lines as text, an empty line between them; the lines are folded."""
    texts = []
    for part in parts:
        if isinstance(part, Table):
            right = [column for column in range(len(part.rows[0])) if column not in part.words]
            texts.append("\n".join(format_table(part.rows, right=right)))
        elif part:
            texts.append("\n".join(folded(part)))
    return "\n\n".join(texts)


def plan_page(
    origin: str,
    plan: Plan,
    flops: Flops,
    sizes: Sequence[Bytes],
    ranks: Sequence[Rank] = (),
    *,
    all_rows: bool = False,
) -> str:
    """Return the report on the plan of a model; ``all_rows``: one row per layer, not one per kind of block."""
    rows = [(row.fqn, row) for row in plan.all_rows] if all_rows else grouped(plan.all_rows)
    layers = [(name or "(the model)", row.shape, verdict_with_gain(row, plan.format)) for name, row in rows]
    bytes_rows = [
        (row.precision, *map(in_units, (row.weights, row.gradients, row.optimizer, row.state)), _sent(row.gathered))
        for row in sizes
    ]
    parts: list[Table | Sequence[str]] = [
        [f"{origin}: {plan.summary()}"],
        Table([("layer", "in -> out", "verdict"), *layers], words=(0, 2)),
        _flops_lines(plan, flops),
        Table([("with AdamW", "weights", "gradients", "moments + masters", "together", "all-gather"), *bytes_rows]),
        [GATHER_NOTE],
    ]
    if host := sizes[-1].host:
        parts.append([f"{HOST_NOTE}: {in_units(host)} under {sizes[-1].precision}."])
    if ranks:
        lines = [["one rank", "state", "in flight", "all-gather", "reduce-scatter", "all-reduce"]]
        for rank in ranks:
            gathers = rank.sent.all_gather_forward + rank.sent.all_gather_backward
            columns = (rank.state, rank.in_flight, gathers, rank.sent.reduce_scatter, rank.sent.all_reduce)
            lines.append([rank.precision, *map(_sent, columns)])
        parts += [Table(lines), [RANK_NOTE]]
    return page(parts)


def _flops_lines(plan: Plan, flops: Flops) -> list[str]:
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
    ]
    if plan.format != "FP8":
        return [*lines, f"gains per layer: not known for {plan.format}"]
    slow = len(plan.below_break_even())
    if slow:
        every = slow == len(plan.converted)
        way = "`bf16-mixed` is expected to be faster" if every else "`--keep` keeps layers in bf16"
        lines.append(f"{slow} of {len(plan.converted)} converted layers are expected to be slower than in bf16; {way}")
    lines.append(f"gains per layer: {SOURCE}, nearest shape; coarse")
    return lines


def _sent(value: float) -> str:
    return in_units(value) if value else "-"
