"""A comparison that shows itself: its table as text, and the table with the picture of the losses in a notebook."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from typing import final

from lightning_lowprec import html
from lightning_lowprec.extras import import_refusal
from lightning_lowprec.tools.compare import pictures, report
from lightning_lowprec.tools.compare.comparison import Comparison


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class ShownComparison(Comparison):
    """All results of one comparison, in the order of ``spec.runs``."""

    def __repr__(self) -> str:
        """Show the table and the remarks."""
        return report.text(self)

    def _repr_html_(self) -> str:
        """Show the verdict, the table, the remarks, the errors and the picture."""
        cells, right = report.rows(self)
        parts = [
            html.paragraph(report.verdict(self), bold=True),
            html.table(cells, right=right),
            html.bullets(report.remarks(self)),
            _picture(self),
        ]
        for result in self.results:
            if result.error is not None:
                parts += [html.paragraph(f"{result.name} failed, seed {result.seed}:"), html.block(result.error)]
        return "".join(parts)


def _picture(comparison: Comparison) -> str:
    """Return the picture of the losses, or a sentence that says how to get one."""
    refusal = import_refusal("matplotlib", "The picture of the losses")
    if refusal is not None:
        return html.paragraph(refusal)
    data = b64encode(pictures.png(comparison)).decode()
    title = "training loss, validation metric, and its distance from the baseline"
    return f'<img alt="{title}" style="max-width:100%" src="data:image/png;base64,{data}">'
