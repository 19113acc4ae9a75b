"""A plan and its costs as text for a terminal, and as a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lightning_lowprec.conversion.gains import SOURCE
from lightning_lowprec.conversion.plan import Plan, PlanRow
from lightning_lowprec.tools.planning.costs import Bytes, Flops

GREEN, YELLOW, DIM, RESET = "\033[32m", "\033[33m", "\033[2m", "\033[0m"
GATHER_NOTE = (
    "all-gather: all weights once, in the dtype in which strategy='fsdp2' gathers them (tensorwise FP8: one byte per"
    " converted weight). Under Lightning's own FSDP2 strategy, bf16-mixed gathers 4 bytes. docs/many-machines.md has"
    " the bytes of a step."
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that is shown."""

    title: str
    precision: str
    plan: Plan
    flops: Flops
    bytes: Sequence[Bytes]


def collapse(rows: Sequence[PlanRow]) -> list[tuple[str, PlanRow, int]]:
    """Rows that differ in a block number only, as one: (fqn with ``*``, a row, how many)."""
    groups: dict[tuple[object, ...], list[PlanRow]] = {}
    for row in rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", row.fqn)
        groups.setdefault((pattern, row.in_features, row.out_features, row.kept, row.trains), []).append(row)
    return [(str(key[0]) if len(same) > 1 else same[0].fqn, same[0], len(same)) for key, same in groups.items()]


def text(report: Report, *, color: bool, all_rows: bool = False) -> str:
    """For a terminal."""
    rows = [(r.fqn, r, 1) for r in report.plan.rows] if all_rows else collapse(report.plan.rows)
    width = max((len(fqn) for fqn, _, _ in rows), default=0)
    lines = [f"{report.title}: {report.plan.summary()}", ""]
    for fqn, row, count in rows:
        verdict = f"FP8, {_gain(row)}" if row.kept is None else f"kept: {row.kept}"
        shape = f"{row.in_features} -> {row.out_features}" + (f" x {row.stored}" if row.stored > 1 else "")
        times = f"{count} x" if count > 1 else ""
        line = f"{times:>6} {fqn:<{width}}  {shape:>18}  {verdict}"
        tint = (DIM if row.kept else YELLOW if row.slower else GREEN) if color else ""
        lines.append(f"{tint}{line}{RESET if color else ''}")
    lines += ["", *_flops_lines(report), "", *_bytes_lines(report.bytes), GATHER_NOTE]
    return "\n".join(lines)


def _gain(row: PlanRow) -> str:
    return "slower than bf16" if row.gain is None else f"about {row.gain:.2f}x"


def _flops_lines(report: Report) -> list[str]:
    flops = report.flops
    attention = f"{flops.attention:.3g} attention" if flops.attention else "attention not known and not counted"
    lines = [
        f"matrix FLOPs per token: {flops.fp8_share:.1%} in FP8"
        f" ({flops.fp8:.3g} FP8, {flops.high_precision:.3g} kept, {attention})"
    ]
    slow = len(report.plan.below_break_even())
    if slow:
        lines.append(f"{slow} converted layers are expected to be slower than in bf16; `--min-gain=auto` keeps them")
    lines.append(f"gains per layer: {SOURCE}, nearest shape; coarse")
    return lines


def _bytes_lines(rows: Sequence[Bytes]) -> list[str]:
    header = f"{'with AdamW':<24} {'weights':>9} {'gradients':>9} {'moments':>9} {'together':>9} {'all-gather':>10}"
    lines = [header]
    for row in rows:
        cells = " ".join(f"{_size(value):>9}" for value in (row.weights, row.gradients, row.optimizer, row.state))
        lines.append(f"{row.precision:<24} {cells} {_size(row.gathered) if row.gathered else '-':>10}")
    return lines


STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;width:100%}td,th{padding:.25em .6em;border-bottom:1px solid #ddd;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}tr.fp8{background:#eaf6ec}tr.slow{background:#fdf3dc}
.bar{display:flex;height:1.4em;background:#eee}.bar span{display:block;white-space:nowrap;overflow:hidden;color:#fff;
padding:0 .4em}.a{background:#2b6cb0}.b{background:#718096}.c{background:#b7791f}i{display:inline-block;width:.8em;
height:.8em;margin:0 .3em 0 .8em}small{color:#666}"""


def page(report: Report) -> str:
    """A self-contained HTML page."""
    flops = report.flops
    total = flops.fp8 + flops.high_precision + flops.attention or 1.0
    parts = (("a", "FP8", flops.fp8), ("b", "kept linear", flops.high_precision), ("c", "attention", flops.attention))
    bar = "".join(f'<span class="{css}" style="width:{100 * value / total:.2f}%"></span>' for css, _, value in parts)
    shares = "".join(f'<i class="{css}"></i>{name} {value / total:.1%} ' for css, name, value in parts if value)
    rows = "".join(_page_row(*entry) for entry in collapse(report.plan.rows))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(report.title)}</title>'
        f"<style>{STYLE}</style><h1>{escape(report.title)}</h1><p><code>precision={escape(report.precision)!r}</code>:"
        f" {escape(report.plan.summary())}.</p><h2>Matrix FLOPs</h2><div class='bar'>{bar}</div><p>{shares}</p>"
        f"<h2>Memory</h2>{_page_bytes(report.bytes)}<p><small>{escape(GATHER_NOTE)}</small></p>"
        "<h2>Layers</h2><table><tr><th>layer<th>count<th>in<th>out<th>verdict<th>expected gain"
        f"</tr>{rows}</table><p><small>Gains: {escape(SOURCE)}, nearest shape; coarse.</small></p></html>"
    )


def _page_row(fqn: str, row: PlanRow, count: int) -> str:
    css = "" if row.kept else "slow" if row.slower else "fp8"
    verdict = "FP8" if row.kept is None else f"kept: {row.kept}"
    gain = "" if row.kept else _gain(row)
    return (
        f'<tr class="{css}"><td><code>{escape(fqn) or "(the model)"}</code><td class=n>{count}<td class=n>'
        f"{row.in_features}<td class=n>{row.out_features}<td>{escape(verdict)}<td class=n>{gain}</tr>"
    )


def _page_bytes(rows: Sequence[Bytes]) -> str:
    most = max(row.state for row in rows) or 1
    lines = []
    for row in rows:
        parts = (("a", "weights", row.weights), ("b", "gradients", row.gradients), ("c", "moments", row.optimizer))
        bar = "".join(
            f'<span class="{css}" style="width:{100 * value / most:.2f}%">{_size(value)}</span>'
            for css, _, value in parts
        )
        lines.append(
            f"<tr><td><code>{escape(row.precision)}</code><td style='width:60%'><div class='bar'>{bar}</div>"
            f"<td class=n>{_size(row.state)}<td class=n>{_size(row.gathered) if row.gathered else '-'}</tr>"
        )
    legend = "".join(f'<i class="{css}"></i>{name} ' for css, name, _ in parts)
    head = f"<tr><th>precision<th>with AdamW: {legend}<th>together<th>all-gather</tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def _size(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"
