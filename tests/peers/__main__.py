"""Run tests that other people wrote under our precisions, and compare them with a control, outcome by outcome.

    make test-peers PEERS=FOLDER

FOLDER holds Lightning's own tests with a plugin for pytest that forces a precision or a strategy on every Trainer, and
a probe of features of the Trainer. A test that the control passes and one of our names does not pass needs a line in
``reasons.txt``: ``name | test | reason``. Names and tests are patterns (``*``). A difference without a reason is a
failure, and so are a reason without a difference and a file that pytest cannot collect. ``--package
pytorch_lightning`` runs Lightning's tests over the other package of Lightning.
"""

import argparse
import atexit
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
NAMES = (
    *("half-auto", "bf16-master", "bf16-remainder", "bf16-8bit"),
    *("fp8-hybrid", "fp8-rowwise", "int8-mixed", "msamp-o2"),
)
FABRIC_NAMES = tuple(name for name in NAMES if name.startswith(("half", "bf16")))
SWAPS = {name: f"base32+force:{name}" for name in NAMES} | {"fsdp2": "base32+strategy:fsdp2"}
LIGHTNING = (
    "tests_pytorch/trainer/optimization",
    "tests_pytorch/models/test_hooks.py",
    "tests_pytorch/callbacks/test_stochastic_weight_avg.py",
    "tests_pytorch/callbacks/test_weight_averaging.py",
    "tests_pytorch/checkpointing/test_trainer_checkpoint.py",
    "tests_pytorch/tuner/test_lr_finder.py",
)
FABRIC = ("tests_fabric/test_fabric.py", "tests_fabric/test_wrappers.py")
AT_LEAST = {LIGHTNING: 145, FABRIC: 115}
"""How many of these tests the control passes at least; fewer means that tests are lost."""
PACKAGES = {"lightning": (), "pytorch_lightning": ("-p", "tests.over_pytorch_lightning")}
"""The packages of Lightning, and what pytest needs to run tests of the first over each."""
Outcomes = dict[str, str]
Suite = tuple[Outcomes, Iterable[tuple[str, Outcomes]]]
"""The outcomes of the control, and of every name as soon as it has run: a message, "" if a test passed."""


class Difference(NamedTuple):
    name: str
    test: str
    message: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-peers", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--names", default=",".join(SWAPS), help="which of: %(default)s")
    parser.add_argument("--suites", default="lightning,fabric,probe", help="which of: %(default)s")
    parser.add_argument("--package", choices=PACKAGES, default="lightning")
    options = parser.parse_args()
    names, suites = options.names.split(","), options.suites.split(",")
    differences: list[Difference] = []
    for suite in suites:
        more = {"package": options.package} if suite == "lightning" else {}
        control, under = SUITES[suite](options.folder.resolve(), names, **more)
        passed = [test for test in control if control[test] == ""]
        for name, outcomes in under:
            found = {test: outcomes.get(test, "no result") for test in passed}
            lost = [Difference(name, f"{suite}:{test}", message) for test, message in found.items() if message]
            differences += lost
            kept = len(passed) - len(lost)
            print(f"{suite:10s} {name:15s} {kept} of {len(passed)} that the control passes", flush=True)
    return report(differences, set(names), set(suites))


def report(differences: list[Difference], names: set[str], suites: set[str]) -> int:
    reasons = list(read_reasons(HERE / "reasons.txt"))
    used: set[int] = set()
    unexplained = 0
    for d in differences:
        found = [i for i, (name, test, _) in enumerate(reasons) if _fits(d, name, test)]
        used.update(found)
        unexplained += not found
        reason = reasons[found[0]][2] if found else f"NO REASON: {d.message[:300]}"
        print(f"{d.name} | {d.test} | {reason}")
    for i, (name, test, _) in enumerate(reasons):
        asked = any(fnmatch.fnmatch(n, name) for n in names) and test.split(":")[0] in suites
        if asked and i not in used:
            unexplained += 1
            print(f"{name} | {test} | REASON WITHOUT A DIFFERENCE")
    print(f"{len(differences)} differences, {unexplained} to explain")
    return int(unexplained > 0)


def _fits(d: Difference, name: str, test: str) -> bool:
    return fnmatch.fnmatchcase(d.name, name) and fnmatch.fnmatchcase(d.test, re.sub(r"\[", "[[]", test))


def read_reasons(path: Path) -> Iterator[tuple[str, str, str]]:
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, test, reason = (part.strip() for part in line.split(" | ", 2))
            yield name, test, reason


# ---- Lightning's own tests


def lightning(folder: Path, names: list[str], package: str = "lightning", files: tuple[str, ...] = LIGHTNING) -> Suite:
    """Return the outcomes of Lightning's tests, of the control and by name: a message, "" if the test passed."""
    scratch = Path(tempfile.mkdtemp(prefix="peers-"))
    atexit.register(shutil.rmtree, scratch)
    tests = unpacked(folder, scratch)
    control = outcomes_of(files, tests, folder, "base32", package)
    passed = list(control.values()).count("")
    if passed < AT_LEAST[files]:
        raise RuntimeError(f"the control passes {passed} of Lightning's tests; expected {AT_LEAST[files]} at least.")
    return control, ((name, outcomes_of(files, tests, folder, SWAPS[name], package)) for name in names)


def trainer(folder: Path, names: list[str], package: str = "lightning") -> Suite:
    """The models of these tests train by SGD, which the names of MS-AMP refuse."""
    return lightning(folder, [name for name in names if not name.startswith("msamp")], package)


def fabric(folder: Path, names: list[str]) -> Suite:
    """Names that convert layers refuse most of them in one way: their Linear layers have 1 or 2 features."""
    return lightning(folder, [name for name in names if name in FABRIC_NAMES], files=FABRIC)


def unpacked(folder: Path, scratch: Path) -> Path:
    (archive,) = (folder / "lightning").glob("tests-*.tar.xz")
    with tarfile.open(archive) as packed:
        packed.extractall(scratch, filter="data")
    return scratch / "tests"


def outcomes_of(
    files: tuple[str, ...], tests: Path, folder: Path, swap: str, package: str, processes: int = 2
) -> Outcomes:
    """Run files or single tests of ``tests`` with the plugin of ``folder``; return the outcome of each, by its name."""
    report = tests.parent / "report.xml"
    path = os.pathsep.join(map(str, (tests, folder / "lightning", HERE.parents[1])))
    environment = os.environ | {"SWAP": swap, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    plugins = [*PACKAGES[package], "-p", "swap_plugin", "-p", "no:cacheprovider"]
    flags = ["-q", "-n", str(processes), *plugins, "-W", "ignore"]
    marker = "markers=flaky: of pytest-rerunfailures, which is not needed"
    command = [sys.executable, "-m", "pytest", *flags, "-o", marker, f"--junitxml={report}", *files]
    ran = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode not in (0, 1):
        raise RuntimeError(
            f"pytest ended with {ran.returncode} under {swap}:\n{ran.stdout[-3000:]}{ran.stderr[-2000:]}"
        )
    outcomes: Outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag: child for child in case}
        test = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
        failed = kinds.get("failure", kinds.get("error"))
        if "skipped" not in kinds:
            outcomes[test] = "" if failed is None else _one_line(failed.get("message"))
    return outcomes


# ---- a probe of the Trainer's features


def probe(folder: Path, names: list[str]) -> Suite:
    source = (folder / "probe1.py").read_text()
    features = re.findall(r"^@f\ndef (\w+)", source, flags=re.MULTILINE)

    def by_feature(name: str) -> Outcomes:
        lines = _lines(folder / "probe1.py", name)
        failed = {m[1]: m[2] for line in lines if (m := re.match(r"FAIL \S+ (\w+): (.*)", line))}
        return {feature: failed.get(feature, "") for feature in features}

    return by_feature("32-true"), ((name, by_feature(name)) for name in names if name in NAMES)


def _lines(script: Path, *arguments: str) -> list[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=script.parent)
    if done.returncode:
        raise RuntimeError(f"{script.name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()


def _one_line(text: str | None) -> str:
    return " ".join((text or "failed").split())


SUITES = {"lightning": trainer, "fabric": fabric, "probe": probe}

if __name__ == "__main__":
    sys.exit(main())
