"""Take the sample of signal to noise that `tests.quality.expect_db` compares with: every test under several seeds.

    python -m tests.noise [files]        without files: all that call `expect_db`

As a plugin of pytest (`-p tests.noise`) this file adds a number to every seed that a test sets.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

import torch

from tests.quality import SAMPLE, WRITTEN_TO

SEEDS = 12
LEAST_DEVIATION = 0.2
"""dB: seeds do not show how another machine orders its sums."""
ADDED = "NOISE_SEED"
_set_seed = torch.manual_seed


class Generator(torch.Generator):
    """A generator whose seeds are moved."""

    def manual_seed(self, seed: int) -> torch.Generator:
        """Add the number to the seed."""
        return super().manual_seed(seed + int(os.environ[ADDED]))


if ADDED in os.environ and __name__ != "__main__":
    torch.manual_seed = lambda seed: _set_seed(seed + int(os.environ[ADDED]))
    torch.Generator = Generator  # type: ignore[misc]


def main(files: list[str]) -> int:
    """Write the means and deviations of the files' tests into the sample; those of other files stay."""
    calling = [path for path in Path("tests").rglob("test_*.py") if "expect_db(" in path.read_text()]
    files = files or sorted(map(str, calling))
    values: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(SEEDS):
            written = Path(folder, str(seed))
            environment = {**os.environ, ADDED: str(1000 * seed), WRITTEN_TO: str(written)}
            options = ["-q", "-p", "tests.noise", "-p", "no:cacheprovider", "-k", tests_of(files)]
            subprocess.run([sys.executable, "-m", "pytest", *options, *files], env=environment, check=False)
            for line in written.read_text().splitlines():
                key, value = json.loads(line)
                values.setdefault(key, []).append(value)
            print(f"{seed + 1} of {SEEDS} seeds", flush=True)
    sample = {key: row for key, row in read().items() if key.partition("::")[0] not in files}
    sample |= {key: [round(mean(row), 2), round(max(stdev(row), LEAST_DEVIATION), 2)] for key, row in values.items()}
    SAMPLE.write_text(json.dumps(dict(sorted(sample.items())), indent=0) + "\n")
    return 0


def tests_of(files: list[str]) -> str:
    """The names of the tests that call `expect_db`, for `-k`."""
    names = set()
    for file in files:
        for part in Path(file).read_text().split("\ndef ")[1:]:
            if part.startswith("test_") and "expect_db(" in part:
                names.add(part.partition("(")[0])
    return " or ".join(sorted(names))


def read() -> dict[str, list[float]]:
    """The sample that is committed."""
    content: dict[str, list[float]] = json.loads(SAMPLE.read_text()) if SAMPLE.exists() else {}
    return content


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
