"""The pages that ``lowprec plan`` prints, for a terminal or as Markdown: a plan, and the formats of every name."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from lightning_lowprec import names
from lightning_lowprec.conversion.gains import SOURCE
from lightning_lowprec.conversion.name_formats import COLUMNS, HALF, LIGHTNINGS
from lightning_lowprec.conversion.name_suffixes import MASTERS, families
from lightning_lowprec.conversion.plan import Plan, grouped, verdict_with_gain
from lightning_lowprec.messages import in_units
from lightning_lowprec.tools.output import folded, format_table
from lightning_lowprec.tools.planning.costs import Bytes, Flops, Rank, formats_of

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
FORMAT_NOTES: Final = (
    f"{', '.join(f'...{suffix}' for suffix in MASTERS)}: an FP8 or int8 name with this suffix; `...` is the format of"
    " the name without."
    " A name with -fp16 has the formats of the name without.",
    "Bits: e2m1 4; e4m3, e5m2, e5m3 and int8 8; bf16, fp16 and int16 16; fp32 32.",
    "output, grad input, grad weight: the operands of the three GEMMs of a Linear, the gradient first.",
    "samples: with `one scale` per tensor, the forward of a sample depends on the others of its batch, of a token on"
    " later tokens; `apart`: it does not.",
    "master: kept beside the weight; int16 holds the digits of fp32 that a bf16 weight lacks.",
    "ddp: the format in which a gradient is sent. fsdp2: the format in which a weight is sent; gradients go in fp32.",
    "-: there is none, or the precision does not run under that strategy. half-auto: fp16 on a device without bf16.",
)
_OF_THE_NAME: Final = ("output", "grad_input", "grad_weight", "samples", "fsdp2")
"""Columns that a suffix does not change."""


class Table(NamedTuple):
    """Rows of cells, the header first."""

    rows: Sequence[Sequence[str]]
    words: Collection[int] = (0,)
    """The columns that are aligned to the left; numbers stand in the others."""


def page(parts: Sequence[Table | Sequence[str]], *, markdown: bool = False) -> str:
    """Return tables and groups of lines as text, an empty line between them; lines but those of Markdown are folded."""
    texts = []
    for part in parts:
        if isinstance(part, Table):
            right = [column for column in range(len(part.rows[0])) if column not in part.words]
            texts.append("\n".join(format_table(part.rows, right=right, markdown=markdown)))
        elif part:
            texts.append("\n".join(part if markdown else folded(part)))
    return "\n\n".join(texts)


def plan_page(
    origin: str,
    plan: Plan,
    flops: Flops,
    sizes: Sequence[Bytes],
    ranks: Sequence[Rank] = (),
    *,
    markdown: bool = False,
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
        [f"{'# ' if markdown else ''}{origin}: {plan.summary()}"],
        Table([("layer", "in -> out", "verdict"), *layers], words=(0, 2)),
        [f"{'- ' if markdown else ''}{line}" for line in _flops_lines(plan, flops)],
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
    return page(parts, markdown=markdown)


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
        lines.append(f"{slow} converted layers are expected to be slower than in bf16; `--keep` keeps layers in bf16")
    lines.append(f"gains per layer: {SOURCE}, nearest shape; coarse")
    return lines


def _sent(value: float) -> str:
    return in_units(value) if value else "-"


# ---- the formats of every name


def all_names() -> list[str]:
    """Return Lightning's names, then the names of this package and of backends that were registered."""
    return [*LIGHTNINGS, *names.TABLE]


def widths(name: str) -> dict[str, str]:
    """Return the format for every column, such as ``fp32``, ``bf16`` or ``e4m3``; ``reason`` if nothing is known."""
    formats = formats_of(name)
    if formats is None:
        return {"precision": name, "reason": "its backend does not say it"}
    return {"precision": name, **formats.row()}


def widths_page(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table of formats, with notes below; families of names, not every member."""
    stems = {name for names in families([row["precision"] for row in rows]).values() for name in names}
    lines = [list(row.values()) for row in rows if "reason" not in row and row["precision"] in stems]
    for suffix in MASTERS:
        formats = HALF[f"bf16{suffix}"].row()
        lines.append([f"...{suffix}", *("..." if c in _OF_THE_NAME else of for c, of in formats.items())])
    header = ["precision", *(column.replace("_", " ") for column in COLUMNS)]
    missing = [f"{row['precision']}: not known, {row['reason']}" for row in rows if "reason" in row]
    return page([Table([header, *lines], words=range(len(header))), missing, FORMAT_NOTES])
