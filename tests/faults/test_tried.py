"""What the tests never try is what a small package, run once, did not do."""

import os
import subprocess
import sys

from tools import tried

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
    file, seen = tmp_path / "lightning_lowprec" / "x.py", tmp_path / "seen"
    file.parent.mkdir()
    seen.mkdir()
    file.write_text(PACKAGE)
    places = tried.write_recorders(tmp_path, seen)
    subprocess.run([sys.executable, file], env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)
    assert tried.never(places, seen) == {"lightning_lowprec/x.py": NEVER}
