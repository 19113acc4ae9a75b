"""`make test-clients`: the table is written as the page has it."""

import lightning_lowprec  # noqa: F401  # registers the names
from tests.clients import __main__ as lane
from tests.clients.recipes import CLIENTS
from tools.versions import PAGE, ROOT


def test_the_page_has_every_client():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert lane.written(page, {}) == page
    assert [client for client in CLIENTS if f"\n| {client} | " not in page] == []
