"""What the tests never try is what a small package, run once, did not do."""

import os
import subprocess
import sys

from tools import tried

PACKAGE = '''"""A package."""

from __future__ import annotations

import os


def halves(numbers, other, word):
    if not numbers or other and word:
        return []
    try:
        other = int(word)
    except ValueError:
        other = [0 for _ in numbers if other]
    finally:
        other = None
    for number in () if other else numbers:
        yield number / 2


print(list(halves([2, 4], 0, "two")), flush=True)
if not os.fork():
    list(halves([2], 1, ""))
    os._exit(0)
os.wait()
'''


def test_what_neither_a_process_nor_its_fork_did(tmp_path):
    file, seen = tmp_path / "lightning_lowprec" / "x.py", tmp_path / "seen"
    for folder in (file.parent, seen):
        folder.mkdir()
    file.write_text(PACKAGE)
    places = tried.write_recorders(tmp_path, seen)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "[1.0, 2.0]\n"
    assert tried.never(places, seen) == {
        "lightning_lowprec/x.py": [
            "9: never false: condition `numbers`",
            "9: never true: operand `word`",
            "16: never reached by an exception: finally `other = None`",
            "17: never true: condition `other`",
        ]
    }
