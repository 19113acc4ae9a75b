"""Plant every fault in a copy of the repository, one at a time, and run the tests that must see it: `make test-faults`.

First the tests run without a fault: a test that fails anyway sees nothing. The exit status is 1 if a fault survives.

    python -m tests.faults [words of an effect]
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.faults.planted import FAULTS, Fault

ROOT = Path(__file__).parents[2]
COPIES = 2
COPIED = ("lightning_lowprec", "tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md")


def copy(folder: Path) -> Path:
    """Copy what the tests read into a new folder; return the folder."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return folder


def tests_fail(folder: Path, files: list[str]) -> tuple[bool, str]:
    """Whether a test of the files fails in the copy, and the line that says which.

    Raises:
        RuntimeError: the tests cannot run at all.
    """
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--durations=0", "--durations-min=9999"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if result.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {result.returncode}:\n{result.stdout[-3000:]}{result.stderr[-1000:]}")
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return result.returncode == 1, failed[0].split(" - ")[0] if failed else ""


def is_caught(fault: Fault, copies: SimpleQueue[Path]) -> bool:
    """Plant one fault in a copy that is free, run its tests, and print the result."""
    folder = copies.get()
    file = folder / fault.file().relative_to(ROOT)
    whole, started = file.read_text(), time.monotonic()
    try:
        file.write_text(whole.replace(fault.old, fault.new))
        caught, test = tests_fail(folder, fault.seen_by.split())
    finally:
        file.write_text(whole)
        copies.put(folder)
    print(
        f"{'caught  ' if caught else 'SURVIVED'}  {fault.effect} ({time.monotonic() - started:.0f} s) {test}",
        flush=True,
    )
    return caught


def main(words: str) -> int:
    """Plant the faults whose effect has the words."""
    faults = [fault for fault in FAULTS if words in fault.effect]
    with tempfile.TemporaryDirectory() as temporary:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(COPIES):
            copies.put(copy(Path(temporary, str(number))))
        print("without a fault ...", flush=True)
        files = sorted({file for fault in faults for file in fault.seen_by.split()})
        fails, test = tests_fail(Path(temporary, "0"), files)
        if fails:
            print(f"fails without a fault: {test}")
            return 1
        with ThreadPoolExecutor(COPIES) as pool:
            caught = sum(pool.map(lambda fault: is_caught(fault, copies), faults))
    print(f"{caught} of {len(faults)} faults are caught")
    return int(caught < len(faults))


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
