"""Which tests ``make test`` leaves to ``make test-more``: those that say so by a mark.

``make test`` (``pytest --tier 1``) runs after every change: at most 4 minutes on two quiet cores, 7 CPU-minutes. What
takes seconds, and shows for every name, world or compiler what a faster test shows once, is marked; ``--tier 2`` runs
that. A test without a mark is in the first tier.

    pytestmark = pytest.mark.slow          all tests of the file, which a run of the first tier does not import
    @pytest.mark.slow                      all cases of the test
    @pytest.mark.slow("a", "b-c")          these cases
    @pytest.mark.slow_but("a", "b-c")      all but these cases
"""

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
CONTRACT = (
    *("half-auto", "fp16-master", "bf16-remainder", "fp8-hybrid", "fp8-hybrid-fp16", "fp8-rowwise-gw-hp-sr"),
    *("msamp-o2", "fp8-toy"),
)
"""The plugins of which the first tier runs the contract. They have each value of what a contract can see."""


@cache
def all_tests_of(path: Path) -> int | None:
    """Return the tier of all tests of a file, or None for a file with tests of both tiers, and for what is no test."""
    if ROOT not in path.parents or not path.match("test_*.py") or path.parent == ROOT / "contract":
        return None
    text = path.read_text()
    if re.search(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", text, re.M):
        return 2
    return None if "@pytest.mark.slow" in text else 1


def of_test(item: pytest.Item, also: Collection[str] = ()) -> int:
    """Return the tier of a collected test; the contract of the plugins in ``also`` is in the first, too."""
    case = item.name.partition("[")[2][:-1]
    for mark in item.iter_markers("slow"):
        if not mark.args or case in mark.args:
            return 2
    if any(case not in mark.args for mark in item.iter_markers("slow_but")):
        return 2
    in_contract = ROOT / "contract" in item.path.parents and hasattr(item, "callspec")
    plugin = item.callspec.params.get("name") if in_contract else None
    return 1 if plugin in (None, *CONTRACT, *also) else 2


def cases_that_are_not_there(items: list[pytest.Item]) -> set[str]:
    """Return the cases that marks name, of tests of which every case was collected, and that were not collected."""
    there = {item.nodeid for item in items}
    return {
        case
        for item in items
        for name in ("slow", "slow_but")
        for mark in item.iter_markers(name)
        for case in (f"{item.nodeid.partition('[')[0]}[{arg}]" for arg in mark.args)
        if case not in there
    }
