"""What the start of `lowprec` and the import of the package cost, in seconds of CPU: `python -m benchmarks.startup`.

The processes run one after the other in turns, so that a busy machine slows all of them alike; the medians are shown.
"""

from __future__ import annotations

import argparse
import os
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
import lightning_lowprec_autoload
lightning_lowprec_autoload.install()
print(time.process_time() - start)
"""
"""What torch does with our entry point at the end of `import torch`, but for the search for entry points, which it does
anyway."""
WRONG = ("plan", "llama", "--precision", "fp8-hybird")


def run(*arguments: str) -> str:
    """Run this Python; return what it printed."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, check=False, text=True)
    return ran.stdout


def cpu_seconds(*arguments: str) -> float:
    """Return the CPU time of a process of this Python, user and system."""
    before = os.times()
    run(*arguments)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure what starting costs.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
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
        entry = []
        for _ in range(rounds):
            entry.append(float(run("-c", ENTRY)))
            for name, arguments in subjects.items():
                seconds[name].append(cpu_seconds(*arguments))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{value:6.2f} s  {name}")
    print(f"lowprec --help / python -c pass: {medians['lowprec --help'] / medians['python -c pass']:.0f}")
    print(f"our entry point, at the end of import torch: {1000 * statistics.median(entry):.1f} ms")
    pairs = zip(seconds["import lightning, lightning_lowprec"], seconds["import lightning"], strict=True)
    print(f"import lightning_lowprec over import lightning: {statistics.median(a - b for a, b in pairs):.2f} s")


if __name__ == "__main__":
    main()
