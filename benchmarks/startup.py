"""What the start of `lowprec` and the import of the package cost, in seconds of CPU: `python -m benchmarks.startup`.

The processes run one after the other in turns, so that a busy machine slows all of them alike; the medians are shown.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = "import sys\nfrom lightning_lowprec.tools.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
ENTRY = """
import os, time
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
start = time.process_time()
import {module}
{module}.install()
print(start, time.process_time() - start)
"""
"""What torch does with an entry point at the end of `import torch`, but for the search for entry points, which it does
anyway."""
OURS, EMPTY = "lightning_lowprec_autoload", "does_nothing"
WRONG = ("plan", "llama", "--precision", "fp8-hybird")


def run(*arguments: str, path: Path = ROOT) -> str:
    """Run this Python in the folder ``path``, where it finds modules first; return what it printed."""
    environ = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=path, env=environ, capture_output=True, check=False, text=True
    )
    return ran.stdout


def cpu_seconds(*arguments: str) -> float:
    """Return the CPU time of a process of this Python, user and system."""
    before = os.times()
    run(*arguments)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def entries(rounds: int) -> None:
    """Print what `import torch` takes, and what our entry point and one that does nothing add to it."""
    seconds: dict[str, list[float]] = {"import torch": [], OURS: [], EMPTY: []}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / f"{OURS}.py", folder)
        Path(folder, f"{EMPTY}.py").write_text("def install():\n    pass\n")
        compileall.compile_dir(folder, quiet=1)  # as pip does with what it installs
        for _ in range(rounds):
            for module in (OURS, EMPTY):
                before, own = run("-c", ENTRY.format(module=module), path=Path(folder)).split()
                seconds["import torch"].append(float(before))
                seconds[module].append(float(own))
    before, ours, empty = (1000 * statistics.median(values) for values in seconds.values())
    print(f"{before:6.0f} ms  python -c 'import torch'")
    print(f"{ours:6.1f} ms  our entry point at its end; {empty:.1f} ms an empty one")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure what starting costs.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--entry", action="store_true", help="only what the entry point adds to `import torch`")
    options = parser.parse_args()
    entries(options.rounds)
    if not options.entry:
        commands(options.rounds)


def commands(rounds: int) -> None:
    """Print what the command takes, and the import of the package beside that of Lightning."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "lowprec")
        script.write_text(SCRIPT)
        subjects = {
            "python -c pass": ("-c", "pass"),
            "lowprec --help": (str(script), "--help"),
            f"lowprec {' '.join(WRONG)}": (str(script), *WRONG),
            "import lightning": ("-c", "import lightning"),
            "import lightning, lightning_lowprec": ("-c", "import lightning, lightning_lowprec"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(rounds):
            for name, arguments in subjects.items():
                seconds[name].append(cpu_seconds(*arguments))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{value:6.2f} s  {name}")
    print(f"lowprec --help / python -c pass: {medians['lowprec --help'] / medians['python -c pass']:.0f}")
    pairs = zip(seconds["import lightning, lightning_lowprec"], seconds["import lightning"], strict=True)
    print(f"import lightning_lowprec over import lightning: {statistics.median(a - b for a, b in pairs):.2f} s")


if __name__ == "__main__":
    main()
