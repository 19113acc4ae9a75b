"""Plants faults in a copy of the repository, one at a time, and runs the tests that see them.

    python -m tests.faults                    plant the faults of the table: a test that saw each must fail
    python -m tests.faults --some 30          plant 30 that are seen soon, other ones for every commit
    python -m tests.faults --draw 230         draw faults until the table has so many of the package's own
    python -m tests.faults --lane ledger --draw 20    draw 20 more, of statements that only this lane's tests run
    python -m tests.faults --see              look for tests that see the faults that were not tried yet
    python -m tests.faults --see --second     look for another test where one alone is known to see a fault
    python -m tests.faults --table F --seed 7 --draw 200    a table of other faults: what share do the tests see?

``--lane`` names the environment in which this runs. ``--see``, and the draw for a lane, need what
``tests/faults/lines.py`` writes.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from tests.faults import changes, forks, table
from tests.faults.lines import ROOT, recorded, sources

LANES = {"ordinary": ".venv", "te": ".venv-te", "deepspeed": ".site-deepspeed", "ledger": ".venv-te"}
"""The environments of ``make test``, ``test-te``, ``test-deepspeed`` and ``test-ledger``."""
ALL_OF = ("numerics", "masters")
"""Rooms of which the table names every test that was found to see a fault; of the others two."""
QUICK = 8.0
"""CPU-seconds that a fault of ``--some`` may take."""


def tests_of(row: table.Row, lane: str, lines: dict[str, dict]) -> list[str]:
    """Return tests that run the statement: those of the room's folder before others, and the fastest first."""
    if "effect" in row:
        return row.get("seen_by", [])
    change = table.change_of(row, sources(lane))
    if change is None:
        return []
    file, span = change.function.partition(":")[0], range(change.line, change.last + 1)
    tests = [test for test, line in lines.items() if not set(line["lines"].get(file, ())).isdisjoint(span)]
    mirror = f"tests/{change.room}/"
    return sorted(filter(table.exists, tests), key=lambda test: (mirror not in test, lines[test]["seconds"]))


def passes(test: str, copy: forks.Copy, known: dict[str, bool]) -> bool:
    """Return whether a test passes without a fault; it is run once."""
    if test not in known:
        known[test] = not forks.run(copy, [test]).failed
    return known[test]


def see(
    row: table.Row, lane: str, limit: float, copy: forks.Copy, lines: dict[str, dict], known: dict[str, bool]
) -> None:
    """Look for tests that see a fault, besides those that are known, and write into the row what was found."""
    first = row.get("seen_by", [])
    functions = {test.partition("[")[0] for test in first}
    tests = [test for test in tests_of(row, lane, lines) if test.partition("[")[0] not in functions]
    plan, tests = table.planted(row), [test for test in tests if known.get(test, True)]
    wanted = len(tests) if "effect" not in row and table.room_of(row) in ALL_OF else 2
    used, ran, failed = 0.0, 0, []
    all_cases = list(dict.fromkeys(test.partition("[")[0] for test in tests if "[" in test))
    for some in (tests[:5], tests[5:40], tests[40:], all_cases):
        left = limit - used
        if some and left > 0 and not failed:
            with copy.planted(*plan):
                outcome = forks.run(copy, some, wanted, left)
            if outcome.error and not outcome.failed:
                print(f"    {outcome.error}", flush=True)
            used, ran = used + outcome.seconds, ran + len(outcome.passed) + len(outcome.failed)
            failed += [test for test in outcome.failed if passes(test, copy, known)]
    if failed:
        row.pop("tried", None)
        one_case = {test.partition("[")[0]: test for test in reversed(failed)}
        seen_by = list(reversed(one_case.values())) if len(one_case) > 1 or first else failed[:2]
        row.update(state="seen", lane=lane, seen_by=[*first, *seen_by], seconds=row.get("seconds", round(used, 1)))
    elif first:
        row["alone"] = {"tests": len(tests), "ran": ran, "seconds": limit}
    else:
        row["state"] = "unseen"
        row.setdefault("tried", {})[lane] = {"tests": len(tests), "ran": ran, "seconds": limit}


def is_asked(row: table.Row, lane: str, limit: float, second: bool) -> bool:
    """Return whether a fault was not tried for so many seconds, for a first test or for a second one."""
    if not second:
        tried = row.get("tried", {}).get(lane, {"seconds": 0})
        return row["state"] in ("untried", "unseen") and tried["seconds"] < limit
    functions = {test.partition("[")[0] for test in row.get("seen_by", [])}
    once = row["state"] == "seen" and "effect" not in row and row["lane"] == lane and len(functions) == 1
    return once and row.get("alone", {"seconds": 0})["seconds"] < limit


def see_all(lane: str, rooms: list[str], limit: float, second: bool) -> int:
    """Try the faults that are asked; the table is written after each."""
    lines = recorded(lane)
    with tempfile.TemporaryDirectory() as folder:
        copy = forks.Copy(Path(folder))
        rows, known = table.read(), {}

        def soonest(row: table.Row) -> float:
            return min([lines[test]["seconds"] for test in tests_of(row, lane, lines) if test in lines], default=1e9)

        for row in sorted(rows, key=soonest):
            if not is_asked(row, lane, limit, second) or (rooms and table.room_of(row) not in rooms):
                continue
            if table.planted(row) is None:
                print(f"gone      {table.name(row)}", flush=True)
                continue
            print(f"...       {table.name(row)}", flush=True)
            see(row, lane, limit, copy, lines, known)
            table.write(rows)
            found = row.get("alone", row.get("seen_by", row.get("tried")))
            print(f"{row['state']:8}  {row.get('seconds', '')} {found}", flush=True)
    print(Counter(row["state"] for row in rows))
    return 0


def check(row: table.Row, copy: forks.Copy) -> str:
    """Plant a fault of the table, and return what became of it; "seen" and "gone" are right."""
    plan = table.planted(row)
    tests = [test for test in row["seen_by"] if table.exists(test)][:2]
    if plan is None or not tests:
        return "gone" if plan is None else "has no test any more"
    for named in (tests, [test.partition("[")[0] for test in tests]):  # a case may have another name now
        with copy.planted(*plan):
            outcome = forks.run(copy, named)
        if outcome.failed:
            return "seen"
        if not outcome.error:
            break
    return f"is not seen: {outcome.error or tests}"


def check_all(rows: list[table.Row], workers: int) -> int:
    """Plant faults in several processes, and print what became of them; return how many are wrong."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        tests = sorted({test for row in rows for test in row["seen_by"][:2] if table.exists(test)})
        workers = max(min(workers, len(tests)), 1)
        for number in range(workers):
            if not (pid := os.fork()):
                copy = forks.Copy(Path(folder, str(number)))
                outcome = forks.run(copy, tests[number::workers], len(tests), 3600) if tests else forks.Outcome()
                results = [[f"fails without a fault {outcome.error}", test] for test in outcome.failed]
                for row in rows[number::workers]:
                    results.append([check(row, copy), table.name(row)])
                    print(*results[-1], flush=True)
                Path(folder, f"{number}.json").write_text(json.dumps(results))
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        results = [
            result for number in range(workers) for result in json.loads(Path(folder, f"{number}.json").read_text())
        ]
    wrong = [result for result in results if result[0] not in ("seen", "gone")]
    for result in wrong:
        print(*result)
    gone = sum(result[0] == "gone" for result in results)
    print(f"{len(rows) - gone} faults planted, {len(wrong)} of them wrong; the code of {gone} has gone")
    return len(wrong)


def draw(seed: int, total: int) -> int:
    """Add faults to the table until every room has its share; faults whose code has gone do not count."""
    rows = table.read()
    here = Counter(table.room_of(row) for row in rows if "effect" not in row and table.change_of(row))
    known = {table.key(row)[0] for row in rows if "effect" not in row}
    of_package = changes.all_changes()
    for change in changes.draw([change for change in of_package if change.function not in known], seed, total):
        if here[change.room] < changes.shares(of_package, total)[change.room]:
            here[change.room] += 1
            rows.append(table.row_of(change))
    table.write(rows)
    print(here, here.total())
    return 0


def draw_for(lane: str, seed: int, count: int) -> int:
    """Add faults of statements that this lane's tests run and those of other lanes, as far as written down, do not."""
    run: dict[str, set[tuple[str, str]]] = {}
    for name in LANES:
        lines: dict[str, set[int]] = defaultdict(set)
        for test in recorded(name).values():
            for file, some in test["lines"].items():
                lines[file].update(some)
        run[name] = {
            change.key[:2]
            for change in (changes.all_changes(sources(name)) if lines else [])
            if not lines[change.function.partition(":")[0]].isdisjoint(range(change.line, change.last + 1))
        }
    others = set().union(*(some for name, some in run.items() if name != lane))
    only = [change for change in changes.all_changes() if change.key[:2] in run[lane] - others]
    rows = table.read()
    known = {table.key(row)[0] for row in rows if "effect" not in row}
    drawn = changes.draw_of([change for change in only if change.function not in known], seed, count)
    table.write([*rows, *map(table.row_of, drawn)])
    print(f"{len(drawn)} of {len(only)} changes")
    return 0


def some_of(rows: list[table.Row], count: int) -> list[table.Row]:
    """Return faults that are seen soon, chosen by the commit."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    quick = [row for row in rows if row["seconds"] <= QUICK and table.planted(row) is not None]
    return random.Random(commit).sample(quick, min(count, len(quick)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--lane", choices=LANES, default="ordinary")
    parser.add_argument("--some", type=int)
    parser.add_argument("--draw", type=int)
    parser.add_argument("--seed", type=int, default=1, help="with --draw")
    parser.add_argument("--table", type=Path, default=table.FILE, help="another table than that of the tree")
    parser.add_argument("--see", action="store_true")
    parser.add_argument("--second", action="store_true", help="with --see: a second test for what one alone sees")
    parser.add_argument("--room", action="append", default=[], help="with --see: of these rooms only")
    parser.add_argument("--seconds", type=float, default=180, help="with --see: of CPU time for each fault")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    table.FILE = args.table
    if args.draw:
        ordinary = args.lane == "ordinary"
        return draw(args.seed, args.draw) if ordinary else draw_for(args.lane, args.seed, args.draw)
    forks.preload()
    if args.see:
        return see_all(args.lane, args.room, args.seconds, args.second)
    rows = [row for row in table.read() if row["state"] == "seen"]
    if args.lane == "ordinary" and not args.some:
        for lane, count in Counter(row["lane"] for row in rows if not (ROOT / LANES[row["lane"]]).exists()).items():
            print(f"left out: {count} faults that need the environment of make test-{lane}")
    mine = [row for row in rows if row["lane"] == args.lane]
    return int(check_all(some_of(mine, args.some) if args.some else mine, args.workers) > 0)


if __name__ == "__main__":
    sys.exit(main())
