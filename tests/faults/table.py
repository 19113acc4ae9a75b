"""The table of faults, ``table.jsonl``: one line of JSON for each, with the tests that see it.

A fault that a person chose has its ``effect`` in words, and text that stands once in the package: ``old`` and ``new``.
The others were drawn: ``function``, ``statement``, ``change``, ``count``. ``state`` is ``untried``, ``seen``,
``struck`` (``why``: it computes the same) or ``unseen`` (``why``: what was tried).
"""

import ast
import json
import os
from functools import cache
from pathlib import Path

from tests.faults.changes import PACKAGE, Change, all_changes, find, room
from tests.faults.lines import ROOT

FILE = Path(__file__).with_name("table.jsonl")
Row = dict[str, object]


def read() -> list[Row]:
    """Return the rows."""
    return [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []


def write(rows: list[Row]) -> None:
    """Write the rows, those of a room together."""
    rows = sorted(rows, key=lambda row: ("effect" not in row, room_of(row) if "effect" not in row else "", name(row)))
    new = FILE.with_suffix(".new")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(new, FILE)


def row_of(change: Change) -> Row:
    """Return the row of a fault that was drawn."""
    function, statement, what, count = change.key
    return {"function": function, "statement": statement, "change": what, "count": count, "state": "untried"}


def key(row: Row) -> tuple[str, str, str, int]:
    return row["function"], row["statement"], row["change"], row["count"]


def name(row: Row) -> str:
    """Return a name for people."""
    return row["effect"] if "effect" in row else "{} | {} | {}".format(*key(row))


@cache
def _changes(package: Path) -> dict[tuple[str, str, str, int], Change]:
    return {change.key: change for change in all_changes(package)}


@cache
def _sources() -> dict[Path, str]:
    return {path: path.read_text() for path in PACKAGE.rglob("*.py")}


def file_with_text_of(row: Row) -> Path | None:
    """Return the file that has the text of a fault that a person chose; None: it stands nowhere, or more than once."""
    files = [path for path, text in _sources().items() if row["old"] in text]
    return files[0] if len(files) == 1 and _sources()[files[0]].count(row["old"]) == 1 else None


def change_of(row: Row, package: Path = PACKAGE) -> Change | None:
    """Return the change of a row that was drawn, or None: the code has gone."""
    return find(key(row), _changes(package))


def planted(row: Row) -> tuple[str, str] | None:
    """Return the file in the package and its source with the fault, or None: the code has gone."""
    if "effect" in row:
        file = file_with_text_of(row)
        return file and (file.relative_to(PACKAGE).as_posix(), _sources()[file].replace(row["old"], row["new"]))
    change = change_of(row)
    return change and (change.function.partition(":")[0], change.planted(change.file().read_text()))


def room_of(row: Row) -> str:
    """Return the room of a fault."""
    plan = planted(row) if "effect" in row else (row["function"].partition(":")[0], "")
    return room(plan[0]) if plan else ""


@cache
def _tests_in(file: str) -> set[str]:
    if not (ROOT / file).exists():
        return set()
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


def exists(test: str) -> bool:
    """Whether the function of a test stands in its file, or the file is there if it is a file."""
    file, _, function = test.partition("::")
    if not function:
        return (ROOT / file).exists()
    return function.rpartition("::")[2].partition("[")[0] in _tests_in(file)
