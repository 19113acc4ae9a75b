"""Every difference of `make test-peers` has a reason, and every reason a difference."""

import fnmatch

import pytest

from tests.peers import __main__ as peers
from tests.peers.__main__ import NAMES, SWAPS, Difference


@pytest.fixture
def reasons(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "HERE", tmp_path)
    return tmp_path / "reasons.txt"


@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        ("# a comment\n\nmsamp-* | probe:swa | refused\n", 0, "msamp-o2 | probe:swa | refused"),
        ("fp8-* | probe:swa | refused\n", 1, "NO REASON: it failed"),
        (
            "msamp-o2 | probe:* | refused\nmsamp-o2 | probe:ema | refused\n",
            1,
            "probe:ema | REASON WITHOUT A DIFFERENCE",
        ),
        ("msamp-o2 | probe:* | refused\nmsamp-o2 | models:t5 | refused\n", 0, "0 to explain"),  # models did not run
    ],
)
def test_reasons_and_differences_meet(reasons, capsys, lines, status, said):
    reasons.write_text(lines)
    found = [Difference("msamp-o2", "probe:swa", "it failed")]
    assert peers.report(found, {"msamp-o2"}, {"probe"}) == status
    assert said in capsys.readouterr().out


def test_every_reason_names_a_swap_and_says_why():
    for name, test, reason in peers.read_reasons(peers.HERE / "reasons.txt"):
        assert any(fnmatch.fnmatchcase(swap, name) for swap in SWAPS)
        assert test.partition(":")[0] in peers.SUITES
        assert len(reason.split()) > 4
    assert set(NAMES) < set(SWAPS)
