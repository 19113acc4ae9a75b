"""The table of faults, ``table.jsonl``: one line of JSON for each, with the tests that see it.

``state`` is ``untried``, ``seen``, ``struck`` (``why``: it computes the same) or ``unseen`` (``why``: what was tried).
"""

import ast
import json
import os
from functools import cache
from pathlib import Path

from tests.faults.changes import PACKAGE, Change, all_changes, find, room
from tests.faults.lines import ROOT
from tests.faults.planted import FAULTS, Fault

FILE = Path(__file__).with_name("table.jsonl")
Row = dict[str, object]


def read() -> list[Row]:
    """Return the rows; faults by hand that are not in the tree's table yet are added as untried."""
    rows = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    known = {row.get("effect") for row in rows}
    texts = {fault.effect for fault in FAULTS}
    by_hand = [{"effect": fault.effect, "state": "untried"} for fault in FAULTS if fault.effect not in known]
    if FILE.parent != Path(__file__).parent:
        return rows
    return [*by_hand, *(row for row in rows if "effect" not in row or row["effect"] in texts)]


def write(rows: list[Row]) -> None:
    """Write the rows, those of a room together."""
    rows = sorted(rows, key=lambda row: ("effect" not in row, room_of(row) if "effect" not in row else "", name(row)))
    new = FILE.with_suffix(".new")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(new, FILE)


def to_plant(rows: list[Row]) -> list[Row]:
    """Return the faults that a test must see; one by hand that was not tried yet is seen by the files it names."""
    named = {fault.effect: {"lane": "ordinary", "seconds": 600.0, "seen_by": fault.seen_by.split()} for fault in FAULTS}
    return [named.get(row.get("effect"), {}) | row for row in rows if row["state"] == "seen" or "effect" in row]


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
def by_effect() -> dict[str, Fault]:
    """Return the faults by hand."""
    return {fault.effect: fault for fault in FAULTS}


def change_of(row: Row, package: Path = PACKAGE) -> Change | None:
    """Return the change of a row that was drawn, or None: the code has gone."""
    return find(key(row), _changes(package))


def planted(row: Row) -> tuple[str, str] | None:
    """Return the file in the package and its source with the fault, or None: the code has gone."""
    if "effect" in row:
        fault = by_effect()[row["effect"]]
        file = fault.file()
        return file.relative_to(PACKAGE).as_posix(), file.read_text().replace(fault.old, fault.new)
    change = change_of(row)
    return change and (change.function.partition(":")[0], change.planted(change.file().read_text()))


def room_of(row: Row) -> str:
    """Return the room of a fault."""
    file = row["function"] if "effect" not in row else by_effect()[row["effect"]].file().relative_to(PACKAGE).as_posix()
    return room(file.partition(":")[0])


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
