"""A comparison as one HTML file that needs nothing but itself."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from html import escape

from lightning_lowprec.tools.compare import table
from lightning_lowprec.tools.compare.pictures import cost_picture, loss_picture
from lightning_lowprec.tools.compare.remarks import remarks
from lightning_lowprec.tools.compare.result import Comparison, PrecisionResult

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
img { max-width: 100% }
table { border-collapse: collapse } td, th { padding: .3em .9em; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child, td:last-child, th:last-child { text-align: left }
.good { color: #006b4f } .bad { color: #b03000; font-weight: 600 }
.remark { background: #fff6e0; border-left: 4px solid #e69f00; padding: .6em 1em }
pre { background: #f6f6f6; padding: .8em; overflow-x: auto; font-size: 13px }
"""
STEP_TIME = (
    "the median over the training batches, the first few left out, of the wall time from the start of a batch to its"
    " loss being read back: forward, backward and optimizer step, without loading the data."
)


def write_report(comparison: Comparison) -> None:
    """Write `report.html` and `loss.png` into the spec's folder."""
    losses = loss_picture(comparison)
    (comparison.spec.out / "loss.png").write_bytes(losses)
    comparison.report.write_text(html(comparison, losses, cost_picture(comparison)), encoding="utf-8")


def html(comparison: Comparison, losses: bytes, costs: bytes) -> str:
    """The whole page."""
    spec = comparison.spec
    parts = [
        f"<h1>{escape(spec.model)} under {len(spec.precisions)} precisions</h1>",
        _verdict(comparison),
        _table(comparison),
        *(f'<p class="remark">{escape(text)}</p>' for text in remarks(comparison)),
        "<h2>Losses</h2>",
        _image(losses, "training loss, validation metric, and its distance from the baseline"),
        "<h2>Time and memory</h2>",
        _image(costs, "step time and peak memory"),
        f"<p>Step time: {escape(STEP_TIME)} Peak memory: {escape(_memory(comparison.results))}.</p>",
        *_said(comparison.results),
        *_errors(comparison.results),
        "<h2>Environment</h2>",
        _environment(comparison),
        f"<h2>What was asked</h2><pre>{escape(json.dumps(spec.as_dict(), indent=2))}</pre>",
    ]
    head = f'<meta charset="utf-8"><title>lowprec compare: {escape(spec.model)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _verdict(comparison: Comparison) -> str:
    spec = comparison.spec
    rule = f"the final {spec.val_metric} within {100 * spec.max_loss_gap:g}% of {spec.baseline}'s"
    if comparison.ok:
        return f'<p class="good">Every precision trained and ended with {escape(rule)}.</p>'
    failed = [r.name for r, v in zip(comparison.results, comparison.verdicts, strict=True) if not v.ok]
    return f'<p class="bad">Not every precision ended with {escape(rule)}: {escape(", ".join(failed))}.</p>'


def _table(comparison: Comparison) -> str:
    rows = [_row("th", table.header(comparison), "")]
    for cells, verdict in zip(table.cells(comparison), comparison.verdicts, strict=True):
        rows.append(_row("td", cells, "good" if verdict.ok else "bad"))
    return f"<table>\n{''.join(rows)}</table>"


def _row(tag: str, cells: Iterable[str], last_class: str) -> str:
    *first, last = [escape(cell) for cell in cells]
    return f'<tr>{"".join(f"<{tag}>{c}</{tag}>" for c in first)}<{tag} class="{last_class}">{last}</{tag}></tr>\n'


def _image(png: bytes, alt: str) -> str:
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _memory(results: Iterable[PrecisionResult]) -> str:
    return next((result.memory_kind for result in results if result.memory_kind), "not measured")


def _said(results: Iterable[PrecisionResult]) -> list[str]:
    items = [f"<li><b>{escape(r.name)}</b>: {escape(note)}</li>" for r in results for note in r.notes]
    return ["<h2>What the precisions said</h2>", f"<ul>{''.join(items)}</ul>"] if items else []


def _errors(results: Iterable[PrecisionResult]) -> list[str]:
    failed = [result for result in results if result.error]
    return [f"<h2>{escape(r.name)} failed</h2><pre>{escape(r.error or '')}</pre>" for r in failed]


def _environment(comparison: Comparison) -> str:
    ran = next((result for result in comparison.results if result.device), None)
    spec = comparison.spec
    facts = {"device": ran.device, "CPU threads": str(ran.threads), **ran.versions} if ran else {}
    facts |= {"seed": str(spec.seed), "steps": str(spec.max_steps), "data": spec.data}
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>\n" for name, value in facts.items())
    return f"<table>\n{rows}</table>"
