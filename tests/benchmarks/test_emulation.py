"""The script behind the figures of docs/what-runs-where.md on the time of emulation."""

import re

import pytest

from benchmarks import emulation


@pytest.mark.slow
def test_it_prints_a_line_for_every_precision(capsys: pytest.CaptureFixture[str]):
    emulation.main(repeats=1)
    rows = re.findall(r"^(\S+) +(\d+) ms of CPU time +([\d.]+) times 32-true$", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, *_ in rows] == list(emulation.NAMES)
    assert rows[0][2] == "1.00"
