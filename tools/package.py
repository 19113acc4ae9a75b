"""Build sdist and wheel, install the wheel in an empty environment, and try what it holds.

The wheel is built from the unpacked sdist, so that a file that the sdist lacks is missed here. Nothing is downloaded:
setuptools and the dependencies are those of the Python that runs this.

    python -m tools.package
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

import tomllib

from tools import starts

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PACKAGE = "lightning_lowprec"
SMOKE = """
import lightning as L, torch, lightning_lowprec
from importlib.metadata import version
assert lightning_lowprec.__file__.startswith(r"{site}"), lightning_lowprec.__file__
assert version("lightning-lowprec") == lightning_lowprec.__version__ == "{version}"
fabric = L.Fabric(precision="fp8-hybrid", accelerator="cpu")
model = torch.nn.Sequential(torch.nn.Linear(16, 16))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters()))
fabric.backward(model(torch.ones(16, 16)).float().sum())
optimizer.step()
"""


def files(*places: str) -> list[str]:
    """Return the paths of the files of the project, those that are not committed yet too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *places]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def build_sdist(folder: Path, scratch: Path) -> Path:
    """Build the sdist from a copy of the project, by setuptools' build hook in a process of its own; return its path.

    Setuptools writes the names of our plugins into the folder that it builds from, and other lanes may read them there.
    """
    for name in files():
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, scratch / name)
    hook = f"from setuptools import build_meta; print('built', build_meta.build_sdist({str(folder)!r}))"
    said = subprocess.run([sys.executable, "-c", hook], cwd=scratch, check=True, capture_output=True, text=True).stdout
    return folder / said.split()[-1]


def build_wheel(sdist: Path, folder: Path, scratch: Path) -> Path:
    """Build the wheel from the unpacked sdist; return its path."""
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    source = scratch / sdist.name.removesuffix(".tar.gz")
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(source))
    return max(folder.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime)


def pip(*arguments: str) -> None:
    """Run pip of this Python."""
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def missing_and_foreign(wheel: Path) -> tuple[set[str], set[str]]:
    """Return the files of the package that the wheel lacks, and the files of the wheel that are not the package's."""
    expected = set(files(PACKAGE, f"{PACKAGE}_autoload.py", f"{PACKAGE}_entry.py"))
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    return expected - held, held - expected


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel alone in an empty environment that finds its dependencies where this Python does."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return site


def main() -> int:
    """Build, check the contents, install, train, run the command, uninstall; return 1 if the wheel is not right."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    DIST.mkdir(exist_ok=True)
    for old in [*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")]:
        old.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        sdist = build_sdist(DIST, Path(scratch) / "copy")
        wheel = build_wheel(sdist, DIST, Path(scratch))
        missing, foreign = missing_and_foreign(wheel)
        if missing or foreign:
            print(f"{wheel.name} is not right: it lacks {sorted(missing)}, and must not hold {sorted(foreign)}.")
            return 1
        site = install(wheel, Path(scratch) / "empty")
        python = Path(scratch) / "empty" / "bin" / "python"
        smoke = SMOKE.format(site=site.resolve(), version=version)
        subprocess.run([python, "-I", "-c", smoke], cwd=scratch, check=True)
        command = [python.with_name("lowprec"), "--version"]
        said = subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True).stdout
        if said.strip() != version:
            print(f"`lowprec --version` prints {said!r}; expected {version}.")
            return 1
        if starts.main(str(python)) != 0:
            return 1
        pip("--python", str(python), "uninstall", "--yes", PACKAGE)
        left = [*(Path(scratch) / "empty").rglob("*lowprec*")]
        if left:
            print(f"After `pip uninstall` these are left: {', '.join(map(str, left))}.")
            return 1
    print(f"{sdist.name} and {wheel.name} are in {DIST.name}/; the wheel installs in an empty environment and trains.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
