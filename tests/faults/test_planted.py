"""Every fault of `make test-faults` can still be planted, and the table of faults says what is known of each."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.faults import changes, table
from tools import tried

ROOT = Path(__file__).parents[2]
ROWS = table.read()


def test_faults_that_a_person_chose_can_be_planted():
    chosen = [row for row in ROWS if "effect" in row]
    gone = [row["effect"] for row in chosen if table.planted(row) is None]
    assert len(gone) <= len(chosen) / 20, gone
    assert all(row["old"] != row["new"] for row in chosen)


SOURCE = '''
class Scale:
    def of(self, amax: float | None, dtype=torch.float32) -> Tensor:
        """Return 448 / amax."""
        if amax <= 0 and not self.empty:
            raise ValueError(f"{amax + 1}")
        self.amax = amax
        return torch.full((2,), 448.0 / -amax, dtype=torch.float32), self

    def __repr__(self):
        return str(1 + 1)
'''


def test_changes_of_a_function_are_named_by_its_text_and_make_another_program():
    found = {change.change: change for change in changes.changes_of("numerics/scale.py", SOURCE)}
    assert found.keys() == {
        "condition: amax <= 0 and (not self.empty) -> ((amax <= 0) or (not self.empty))",
        "branch: amax <= 0 and (not self.empty) -> not (amax <= 0 and (not self.empty))",
        "comparison: amax <= 0 -> (amax < 0)",
        "constant: 0 -> 1",
        "sign: not self.empty -> (self.empty)",
        "left out: self.amax = amax -> pass",
        "returned: (torch.full((2,), 448.0 / -amax, dtype=torch.float32), self)"
        " -> (self, torch.full((2,), 448.0 / -amax, dtype=torch.float32))",
        "argument: torch.full((2,), 448.0 / -amax, dtype=torch.float32) -> torch.full((2,), 448.0 / -amax)",
        "constant: 2 -> 3",
        "constant: 448.0 -> 896.0",
        "operator: 448.0 / -amax -> ((448.0) * (-amax))",
        "sign: -amax -> (amax)",
        "dtype: torch.float32 -> torch.bfloat16",
    }
    change = found["operator: 448.0 / -amax -> ((448.0) * (-amax))"]
    assert (change.function, change.line, change.room) == ("numerics/scale.py:Scale.of", 8, "numerics")
    assert change.planted(SOURCE) == SOURCE.replace("448.0 / -amax", "((448.0) * (-amax))")


def test_a_fault_is_found_where_its_function_has_moved_and_not_where_it_has_gone():
    before = {change.key: change for change in changes.changes_of("numerics/scale.py", SOURCE)}
    moved = {change.key: change for change in changes.changes_of("numerics/formats.py", "import torch\n" + SOURCE)}
    other = {change.key: change for change in changes.changes_of("numerics/scale.py", SOURCE.replace("of", "at"))}
    for key, change in before.items():
        assert changes.find(key, moved).line == change.line + 1
        assert changes.find(key, other) is None


def test_a_draw_takes_every_room_and_kind_and_keeps_its_faults_when_others_go():
    every = [change for at, change in enumerate(changes.all_changes()) if at % 3 == 0 or change.kind == "axis"]
    drawn = changes.draw(every, 7, 200)
    rooms = Counter(change.room for change in drawn)
    assert min(rooms[room] for room in changes.ROOMS) >= changes.FEWEST
    assert len(drawn) >= 195
    assert len({change.kind for change in drawn}) == 11
    gone = drawn[0].function
    again = changes.draw([change for change in every if change.function != gone], 7, 200)
    assert len({change.key for change in drawn} & {change.key for change in again}) > 150


def test_the_table_says_what_is_known_of_each_fault():
    for row in ROWS:
        assert row["state"] in ("untried", "seen", "struck", "unseen"), row
        assert row["state"] != "seen" or row["seen_by"], row
        assert all(map(table.exists, row.get("seen_by", []))), row
        assert row["state"] not in ("struck", "finding") or row["why"], row
    names = [table.name(row) for row in ROWS]
    assert len(set(names)) == len(names)
    by_machine = Counter(row["state"] for row in ROWS if "effect" not in row)
    assert by_machine["struck"] <= by_machine.total() / 5


PACKAGE = """
def halves(numbers, other, word):
    if not numbers or other and word:
        return []
    try:
        other = int(word)
    except ValueError:
        other = [0 for _ in numbers if other]
    finally:
        other = None
    return [number / 2 for number in (() if other else numbers)]
import os
assert halves([2, 4], 0, "two") == [1, 2]
if not os.fork():
    os._exit(halves([2], 1, "") != [1])
assert os.wait()[1] == 0
"""
NEVER = [
    "3: never false: condition `numbers`",
    "3: never true: operand `word`",
    "10: never reached by an exception: finally `other = None`",
    "11: never true: condition `other`",
]


def test_what_neither_a_process_nor_its_fork_did(tmp_path):
    file, seen = tmp_path / "lightning_lowprec" / "x.py", tmp_path / "lightning_lowprec" / "seen"
    seen.mkdir(parents=True)
    file.write_text(PACKAGE)
    places = tried.write_recorders(tmp_path, seen)
    subprocess.run([sys.executable, file], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)
    assert tried.never(places, seen) == {"lightning_lowprec/x.py": NEVER}
