"""`make test-clients`: what counts as working, as a refusal and as a failure, and how the table is written."""

import pytest

import lightning_lowprec  # noqa: F401  # registers the names
from tests.clients import __main__ as lane
from tests.clients.recipes import CLIENTS
from tools.versions import PAGE, ROOT

FINE = {"loss": 2.0, "differs": 0.0}


@pytest.mark.parametrize(
    ("ran", "cell", "note", "left"),
    [
        ({"loss": 2.06, "differs": 0.0}, "+3.00%", "", 0),  # 16 times the 0.2 % of bf16-mixed
        ({"loss": 2.08, "differs": 0.0}, "+4.00%", "the loss differs by +4.00%, allowed are 3.20%", 1),
        ({"loss": float("nan"), "differs": 0.0}, "+nan%", "the loss differs by +nan%, allowed are 3.20%", 1),
        ({"loss": 2.0, "differs": 0.5}, "+0.00%", "the file predicts other values: 5.0e-01 of the largest", 1),
        ({"error": "ValueError: no | of ours", "refused": True}, "refused", r"ValueError: no \| of ours", 0),
        ({"error": "RuntimeError: shapes", "refused": False}, "error", "RuntimeError: shapes", 1),
    ],
)
def test_a_run_works_is_refused_or_is_a_failure(ran, cell, note, left):
    runs = {"32-true": FINE, "bf16-mixed": {"loss": 2.004, "differs": 0.0}, "fp8-hybrid": ran}
    line, unexplained = lane.row("darts", "1.0", runs)
    shown = f"`fp8-hybrid`: {note}" if note else ""
    assert line == f"| darts | 1.0 | +0.20% | {cell} | {shown} |"
    assert len(unexplained) == left


def test_the_page_has_every_client():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert lane.written(page, {}) == page
    for client in CLIENTS:
        assert f"\n| {client} | " in page, client
