"""Every fault of `make test-faults` can still be planted, and names tests that exist."""

from pathlib import Path

import pytest

from tests.faults.planted import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.effect)
def test_fault_can_be_planted(fault):
    assert fault.file().read_text().replace(fault.old, fault.new) != fault.file().read_text()
    assert all((ROOT / file).exists() for file in fault.seen_by.split())
