"""Write the goldens, or compare two commits: ``python -m tests.golden [COMMIT | --add]``.

Without an argument, ``tests/golden/golden.json`` is written, which a reviewer then sees in the change. With a commit,
the runs of this tree are made with the package of that commit and with the package of this tree, and differences are
printed. ``--add`` measures only the names that the file does not have.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.golden.goldens import FILE, add, measured

ROOT = Path(__file__).parents[2]


def of_package(package: Path, folder: str) -> dict:
    """Return the goldens of the package in a folder, by the runs of this tree, from another process."""
    tree = Path(folder, "tree")
    tree.mkdir()
    for name, target in {"lightning_lowprec": package / "lightning_lowprec", "tests": ROOT / "tests"}.items():
        (tree / name).symlink_to(target)
    out = Path(folder, "golden.json")
    code = "import sys; from tests.golden import goldens; goldens.write(sys.argv[1])"
    environ = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(out)], cwd=tree, env=environ, check=True)
    return json.loads(out.read_text())


def compare(commit: str) -> int:
    """Print what differs between a commit and this tree; return the number of runs that differ."""
    with TemporaryDirectory() as old, TemporaryDirectory() as new:
        checkout = Path(old, "checkout")
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(checkout), commit], check=True)
        try:
            before, now = of_package(checkout, old)["runs"], of_package(ROOT, new)["runs"]
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(checkout)], check=True)
    different = [run for run in sorted(before.keys() | now.keys()) if before.get(run) != now.get(run)]
    for run in different:
        last = [float.fromhex(found[run]["losses"][-1]) if run in found else None for found in (before, now)]
        print(f"{run}: last loss {last[0]} at {commit}, {last[1]} here")
    print(f"{len(different)} of {len(before.keys() | now.keys())} runs differ")
    return len(different)


if __name__ == "__main__":
    if sys.argv[1:] == ["--add"]:
        sys.exit(add())
    if sys.argv[1:]:
        sys.exit(1 if compare(sys.argv[1]) else 0)
    FILE.write_text(json.dumps(measured(), indent=1) + "\n")
