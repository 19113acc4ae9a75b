"""The names that docs/migration.md quotes from other stacks, and where these names stand in the stacks.

``python -m tests.migration.quoted STACK CHECKOUT`` looks up those of a stack that is not installed, in a clone of its
repository: the commits are those of ``sources.yaml``.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migration.md"
STACKS = {
    "From NeMo and Megatron": "nemo-megatron",
    "From torchtitan": "torchtitan",
    "From SageMaker SMP v2": "smp",
    "From Accelerate": "accelerate",
    "From the Trainer of transformers": "transformers-trainer",
    "From Axolotl": "axolotl",
    "From plain Lightning": "lightning",
    "From MS-AMP": "ms-amp",
    "From DeepSpeed": "deepspeed",
}
"""The headings of the sections, and the stacks in ``sources.yaml``."""
SOURCES: dict[str, list[dict]] = yaml.safe_load((Path(__file__).parent / "sources.yaml").read_text())
NAME = r"[A-Za-z_][\w-]*"


def sections() -> dict[str, str]:
    parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {STACKS[part.partition("\n")[0]]: part for part in parts}


def quoted(page: str) -> set[str]:
    blocks = re.findall(r"^```text\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    cells = [line.strip("| ").split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    return {name.strip("-") for text in [*blocks, *spans] for name in re.findall(NAME, text)} - {"-"}


def known(stack: str) -> set[str]:
    entries = SOURCES[stack]
    return {name for entry in entries for names in entry["files"].values() for name in names} | {
        name for entry in entries for name in entry.get("user", [])
    }


def absent(entry: dict, text_of: Callable[[str], str]) -> Iterator[str]:
    """Yield a line for every name that does not stand in the file of the source."""
    for file, names in entry["files"].items():
        text = text_of(file)
        for name in names:
            if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text):
                yield f"{name} is not in {file.strip()}"


def main(argv: Sequence[str]) -> int:
    stack, checkout = argv
    found, looked = [], 0
    for entry in SOURCES[stack]:
        commit = entry["commit"]
        seen = subprocess.run(["git", "-C", checkout, "cat-file", "-e", commit], capture_output=True, check=False)
        if seen.returncode:
            print(f"left out: {entry['repository']}, whose commit {commit[:7]} is not in {checkout}")
            continue

        def text_of(file: str, commit: str = commit) -> str:
            command = ["git", "-C", checkout, "show", f"{commit}:{file}"]
            return subprocess.run(command, capture_output=True, check=True, text=True).stdout

        found += absent(entry, text_of)
        looked += sum(map(len, entry["files"].values()))
    print("\n".join(found) or f"{stack}: all {looked} names are there")
    return int(bool(found) or not looked)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
