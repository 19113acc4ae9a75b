"""Write the part of docs/evidence.md that has figures, and its pictures, from the newest committed results."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from benchmarks.convergence.pictures import GAPS
from benchmarks.convergence.report import summary
from benchmarks.convergence.results import FILE, Results

ROOT = Path(__file__).parents[2]
PAGE = Path("docs", "evidence.md")
RESULTS = Path("benchmarks", "results")
PICTURES = {
    GAPS: Path("docs", "pictures", "evidence-gaps.png"),
    "losses.png": Path("docs", "pictures", "evidence-losses.png"),
}
"""Runs before 24 November drew the second one too; `lowprec compare` draws losses."""
BEGIN = "<!-- evidence: written by `python -m benchmarks.convergence --page` -->"
END = "<!-- evidence: end -->"
NOTHING = "No results are committed yet. `make evidence` trains all of this on a CPU and writes a report."
SHOWN = (
    "![The mean difference of the validation loss from float32, with its 95 % interval, for each precision and"
    f" model]({PICTURES[GAPS].relative_to('docs').as_posix()})",
    "![The training loss of seven precisions on each model](pictures/evidence-losses.png)",
)


def newest(root: Path = ROOT) -> Path | None:
    """Return the folder of the newest committed results, None if there are none.

    Raises:
        ValueError: a folder has results of toy sizes.
    """
    folders = [path.parent for path in (root / RESULTS).glob(f"*/convergence/{FILE}")]
    dated = [(Results.read(folder).data, folder) for folder in folders]
    if toys := [str(folder) for data, folder in dated if data["smoke"]]:
        raise ValueError(f"{', '.join(toys)}: results of toy sizes are not committed; delete the folder.")
    return max(dated, key=lambda entry: (entry[0]["date"], entry[1].as_posix()))[1] if dated else None


def section(root: Path = ROOT) -> str:
    """Return the text between the markers."""
    folder = newest(root)
    if folder is None:
        return NOTHING
    shown = [words if (folder / name).exists() else "" for name, words in zip(PICTURES, SHOWN, strict=True)]
    return "\n\n".join(filter(None, [shown[0], summary(Results.read(folder)), shown[1]]))


def updated(text: str, root: Path = ROOT) -> str:
    """Return the page with a new section.

    Raises:
        ValueError: the page lacks the markers.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{PAGE} must have {BEGIN} and {END} once each.")
    return re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n{section(root)}\n{END}", text, flags=re.S
    )


def write(root: Path = ROOT) -> None:
    """Write the page, and copy the pictures beside it."""
    path, folder = root / PAGE, newest(root)
    path.write_text(updated(path.read_text(encoding="utf-8"), root), encoding="utf-8")
    if folder is not None:
        for name, copy in PICTURES.items():
            if (folder / name).exists():
                shutil.copyfile(folder / name, root / copy)
