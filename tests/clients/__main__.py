"""Run other people's packages of Lightning with only the precision changed; write the table of docs/what-runs-where.md.

    make test-clients                          # every client
    make test-clients CLIENTS="darts timm"     # these; the other rows stay

Each run is a process with a time limit: it fits, predicts, saves, reads the file again and predicts again
(``recipes.py``). A run works if its loss is near that of 32-true, and the file predicts what the fitted client
predicted. Near means at most ``FACTOR`` times as far as bf16-mixed. A run that does not work is refused by an error of
ours, which the table shows. Anything else is a failure.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from tests.clients.recipes import CLIENTS, PACKAGES
from tools.versions import PAGE, ROOT

CONTROLS: Final = ("32-true", "bf16-mixed")
NAMES: Final = ("half-auto", "bf16-remainder", "bf16-8bit", "fp8-hybrid", "int8-mixed", "msamp-o2")
FACTOR: Final = 16.0
"""bf16 has 8 significant bits and float8_e4m3fn has 4, so its rounding errors are 2**4 times as large."""
NEAR: Final = 2.0**-5
"""The difference of the loss that is near in any case, since that of bf16-mixed may be almost zero by chance: a value
that is rounded to float8_e4m3fn is off by at most 2**-4 of itself, and by about half of this on average."""
BEGIN: Final = "<!-- clients: written by `make test-clients` -->"
END: Final = "<!-- clients: end -->"
HERE: Final = f"{platform.python_version()}, {version('lightning')}"
"""The versions of Python and of Lightning, which the table has beside that of the client."""
Outcome = Mapping[str, Any]
"""``loss`` and ``differs`` of a run, or its ``error`` and whether it was ``refused``."""


def outcomes_of(client: str, names: Sequence[str]) -> dict[str, Outcome]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.clients.recipes", client, *names]
    ran = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    outcomes, log = {}, ""
    for line in ran.stdout.splitlines():
        if line.startswith('{"name": '):
            result = json.loads(line)
            outcomes[result.pop("name")] = result
            log = ""
        else:
            log += f"{line}\n"
    missing = {"error": f"no result: {log[-300:]}", "refused": False}
    return {name: outcomes.get(name, missing) for name in names}


def row(client: str, release: str, outcomes: Mapping[str, Outcome]) -> tuple[str, list[str]]:
    exact = outcomes["32-true"]
    if "error" in exact:
        return "", [f"{client}, 32-true: {exact['error']}"]
    cells, notes, unexplained = [], [], []
    gaps = {name: ran["loss"] / exact["loss"] - 1 for name, ran in outcomes.items() if "loss" in ran}
    bound = max(FACTOR * abs(gaps.get("bf16-mixed", 0.0)), NEAR)
    for name, ran in outcomes.items():
        if name == "32-true":
            continue
        fault = ran.get("error", "")
        if not fault and not abs(gaps[name]) <= bound:
            fault = f"the loss differs by {gaps[name]:+.2%}, allowed are {bound:.2%}"
        if not fault and ran["differs"] > exact["differs"]:
            fault = f"the file predicts other values: {ran['differs']:.1e} of the largest"
        cells.append("refused" if ran.get("refused") else "error" if "error" in ran else f"{gaps[name]:+.2%}")
        if fault:
            notes.append(f"`{name}`: {_cell(fault)}")
            if not ran.get("refused"):
                unexplained.append(f"{client}, {name}: {fault}")
    return f"| {client} | {release} | {' | '.join(cells)} | {'<br>'.join(notes)} |", unexplained


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= 240 else f"{line[:240].rpartition(' ')[0]} ..."


def written(page: str, rows: Mapping[str, str]) -> str:
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()[2:]}
    lines: Iterator[str | None] = (rows.get(client) or kept.get(client) for client in CLIENTS)
    head = ["client", "version (Python, Lightning)", *CONTROLS[1:], *NAMES, "differences"]
    text = "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *filter(None, lines)])
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(wanted: Sequence[str]) -> int:
    unexplained: list[str] = []
    print(f"{HERE}, torch {version('torch')}, torchao {version('torchao')}", flush=True)
    for client in wanted or CLIENTS:
        release = f"{version(PACKAGES.get(client, client))} ({HERE})"
        line, more = row(client, release, outcomes_of(client, (*CONTROLS, *NAMES)))
        unexplained += more
        print(line, flush=True)
        page = (ROOT / PAGE).read_text(encoding="utf-8")
        (ROOT / PAGE).write_text(written(page, {client: line}), encoding="utf-8")
    print("\n".join([*unexplained, f"{len(unexplained)} to explain"]))
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
