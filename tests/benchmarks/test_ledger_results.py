"""What the docs say was counted is what the committed ledger holds."""

import json
import re
from pathlib import Path

from benchmarks.ledger import report, roofline
from benchmarks.ledger.entry import Entry

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks/results/null-gpu-2026-11-22"
FORMS = {
    "`fp8-tensorwise`, the arithmetic of `fp8-hybrid-torchao`; blocks compiled": "ours fp8-tensorwise",
    "`fp8-hybrid-te`": "ours fp8-hybrid-te",
    '`fp8-hybrid-te`, `fuse="auto"`': "ours fp8-hybrid-te, fuse",
    "`fp8-hybrid-te`, blocks compiled by the user": "ours fp8-hybrid-te, blocks compiled",
}


def entries():
    data = json.loads((FOLDER / "ledger.json").read_text())
    return [Entry.from_json({**entry, "kernels": []}) for entry in data["entries"]]


def test_the_page_on_backends_shows_the_ledger():
    found = {entry.contender: entry for entry in entries()}
    text = (ROOT / "docs/which-backend.md").read_text().partition("<!-- ledger")[2].partition("<!-- /ledger")[0]
    shown = {
        row[0]: row[1:] for row in (re.split(r" *\| *", line.strip("| ")) for line in text.splitlines()[3:] if line)
    }
    assert shown == {
        words: [
            f"{found[key].block().bytes / 1e9:.2f}",
            str(found[key].whole().kernels),
            f"{found[key].peak / 1e9:.1f}",
            f"{roofline.predict(found[key], roofline.assumed()).total:.0f}",
        ]
        for words, key in FORMS.items()
    }


def test_torchao_compiled_is_predicted_to_be_ahead():
    """The evidence for what ``fp8-hybrid`` means; another result changes the rule."""
    found = {entry.contender: entry for entry in entries()}
    for rates in roofline.H200:
        times = {key: roofline.predict(found[key], roofline.assumed(rates)).total for key in FORMS.values()}
        assert min(times, key=times.get) == "ours fp8-tensorwise"
    assert found["ours fp8-tensorwise"].peak < found["ours fp8-hybrid-te"].peak


def test_the_committed_report_is_made_from_the_committed_figures():
    data = json.loads((FOLDER / "ledger.json").read_text())
    text = report.markdown(entries(), data["missing"], roofline.assumed(), "python -m benchmarks.ledger")
    assert (FOLDER / "ledger.md").read_text() == text


def test_predictions_stay_out_of_the_readme():
    assert "predicted ms" not in (ROOT / "README.md").read_text()
