"""Write the table of tested versions of docs/what-runs-where.md, from the environments in which the lanes ran.

python -m tools.versions           # at the end of `.ci/run`; an environment that is not there keeps its row
python -m tools.versions --check   # exit status 1 if the table is another one
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path("docs", "what-runs-where.md")
BEGIN = "<!-- versions: written by `python -m tools.versions` -->"
END = "<!-- versions: end -->"
LANES: Mapping[str, tuple[str, ...]] = {
    "`make test`": (".venv",),
    "`make test-floor`": (".venv-floor",),
    "`make test-te`, `make test-ledger`": (".venv-te",),
    "`make test-deepspeed`": (".venv", ".site-deepspeed"),
}
"""The folders that a lane imports from."""
PACKAGES = ("torch", "lightning", "torchao", "transformer-engine", "deepspeed", "transformers", "jsonargparse")


def row(lane: str, root: Path = ROOT) -> str | None:
    """Return the line of a lane: Python and packages; None if one of its environments is not there."""
    folders = [root / name for name in LANES[lane]]
    pythons = [path for folder in folders for path in folder.glob("lib/python3.*/site-packages")]
    if not all(folder.is_dir() for folder in folders) or not pythons:
        return None
    paths = [str(path) for path in (*folders, *pythons)]
    found = {dist.name.lower().replace("_", "-"): dist.version for dist in importlib.metadata.distributions(path=paths)}
    cells = [lane, pythons[0].parent.name.removeprefix("python"), *(found.get(name, "-") for name in PACKAGES)]
    return f"| {' | '.join(cells)} |"


def updated(page: str, root: Path = ROOT) -> str:
    """Return the page with the lines of the environments that are there; the others stay.

    Raises:
        ValueError: the page lacks the markers.
    """
    before, begin, rest = page.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} needs the lines {BEGIN!r} and {END!r}.")
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines() if re.match(r"\| `make", line)}
    lines = [row(lane, root) or kept.get(lane) for lane in LANES]
    head = ["lane", "Python", *PACKAGES]
    text = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *filter(None, lines)]
    return f"{before}{begin}\n" + "\n".join(text) + f"\n{end}{after}"


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Return 0, or with ``--check`` 1 if the table is another one."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.versions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    page = (root / PAGE).read_text(encoding="utf-8")
    new = updated(page, root)
    if options.check:
        return int(new != page)
    (root / PAGE).write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
