"""Run what every precision promises on each torch that is supported, over both packages of Lightning; write the table.

python -m tools.torch_versions             # every environment of ENVIRONMENTS that is there; others keep their rows
python -m tools.torch_versions 2.15        # this one
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from tools.versions import PAGE, ROOT

ENVIRONMENTS: Final[Mapping[str, str]] = {
    "2.11": ".venv-floor",
    "2.13": ".venv",
    "2.14": ".venv-2.14.1",
    "2.15": ".venv-2.15.0",
}
"""The folder of each minor version; `make test-versions` makes them."""
FORMATS: Final = ("bf16-8bit", "fp8-block", "mxfp8")
"""Plugins that are not in the contract of the first tier: their formats use parts of torch that the others do not."""
TESTS: Final[Mapping[str, Sequence[str]]] = {
    "lightning": [
        *(f"--plugin={name}" for name in FORMATS),
        *("tests/contract", "tests/registration", "tests/masters", "tests/numerics"),
    ],
    "pytorch-lightning": ["-p", "tests.over_pytorch_lightning", "tests/contract"],
}
"""What pytest runs over each package."""
BEGIN: Final = "<!-- torch: written by `make test-versions` -->"
END: Final = "<!-- torch: end -->"


def installed(environment: Path) -> dict[str, str]:
    """Return the versions of the packages in an environment."""
    paths = [str(path) for path in environment.glob("lib/python3.*/site-packages")]
    return {dist.name.lower().replace("_", "-"): dist.version for dist in distributions(path=paths)}


def tested(environment: Path, arguments: Sequence[str]) -> tuple[str, bool]:
    """Run pytest; return how many tests passed and failed in words, and whether all is well."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [environment / "bin" / "python", "-m", "pytest", "-n", "2", "--dist", "worksteal", "--tier", "1"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ran = subprocess.run([*command, f"--junitxml={report}", *arguments], cwd=ROOT, env=variables)
        suite = ET.parse(report).getroot()[0] if report.exists() else None
    if suite is None:
        return f"pytest ended with {ran.returncode}", False
    number = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    bad = number["failures"] + number["errors"]
    words = f"{number['tests'] - bad - number['skipped']} passed" + (f", **{bad} failed**" if bad else "")
    return words, ran.returncode == 0


def row(environment: Path) -> tuple[str, bool]:
    """Return the line of an environment, and whether all of its tests passed."""
    versions = installed(environment)
    cells, well = [versions["torch"], versions["torchao"]], True
    for package, arguments in TESTS.items():
        words, passed = tested(environment, arguments)
        cells.append(f"{versions[package]}: {words}")
        well = well and passed
    return f"| {' | '.join([*cells, date.today().isoformat()])} |", well


def main(wanted: Sequence[str]) -> int:
    """Write the lines of the environments that are there; return 1 if a test failed."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    minor = re.compile(r"\| (\d+\.\d+)")
    lines = {match[1]: line for line in table.splitlines() if (match := minor.match(line))}
    well = True
    for version in wanted or ENVIRONMENTS:
        environment = ROOT / ENVIRONMENTS[version]
        if not environment.is_dir():
            print(f"left out: torch {version}, whose environment {environment.name} is not there")
            continue
        lines[version], passed = row(environment)
        print(lines[version])
        well = well and passed
    head = ["| torch | torchao | lightning | pytorch-lightning | run on |", "|---|---|---|---|---|"]
    text = "\n".join([*head, *(lines[version] for version in sorted(lines))])
    (ROOT / PAGE).write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    return int(not well)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
