"""`import torch` works in every form of install of this package, whole or damaged: torch loads its entry point."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tests import forked
from tests.once import once
from tools import package

BUILD = """
import sys
sys.path.insert(0, "tools/editable")
import lowprec_build
_, wheel, editable = sys.argv
lowprec_build.build_wheel(wheel)
lowprec_build.build_editable(editable)
"""
LOAD = """
import site, sys, warnings
import torch
for name in [name for name in sys.modules if "lightning_lowprec" in name]:
    del sys.modules[name]
names = {getattr(finder, "__name__", type(finder).__name__): finder for finder in sys.meta_path}
sys.meta_path[:] = [finder for name, finder in names.items() if name not in ("_Finder", "_EditableFinder")]
sys.path[:] = [FOLDER, *(path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix)))]
if IS_SITE:
    site.addsitedir(FOLDER)
warnings.simplefilter("error" if STRICT else "always")
torch._import_device_backends()  # as `import torch` does
autoload = sys.modules.get("lightning_lowprec_autoload")
print(autoload.__file__ if autoload is not None and autoload.installed_by_torch else "unknown")
"""
LOST = "lightning_lowprec is installed, but its files are missing or broken ("


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    with once(tmp_path_factory.mktemp("installs"), "installs") as (folder, missing):
        if missing:
            more = ("tools/editable", "*.toml", "*.md", "*.in", "LICENSE")
            for name in package.files("lightning_lowprec", "lightning_lowprec_*.py", *more):
                (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(package.ROOT / name, folder / "clone" / name)
            folders = [folder / f"{form}.dist" for form in ("wheel", "editable")]
            for dist in folders:
                dist.mkdir()
            building = [sys.executable, "-c", BUILD, *folders]
            subprocess.run(building, cwd=folder / "clone", check=True, capture_output=True)
            for dist in folders:
                (wheel,) = dist.glob("*.whl")
                package.pip("install", "--no-deps", "--no-index", "--target", str(dist.with_suffix("")), str(wheel))
    return folder


def load(folder, *, is_site=False, strict=False):
    """Load torch's entry points with ``folder`` first on ``sys.path``; return what was printed and warned of."""
    code = LOAD.replace("FOLDER", repr(str(folder))).replace("IS_SITE", str(is_site)).replace("STRICT", str(strict))
    ran = forked.python("-c", code, cwd=folder.parent, environ={**os.environ, "PYTHONPATH": ""})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip(), ran.stderr


def assert_lost(folder, why="ModuleNotFoundError", **options):
    said, warned = load(folder, **options)
    assert said == "unknown"
    assert warned.count(f"{LOST}{why}") == (not options.get("strict"))


@pytest.mark.parametrize("form", ["a wheel", "a zip on the path", "an editable install"])
def test_a_whole_install_is_known(built, form):
    (wheel,) = (built / "wheel.dist").glob("*.whl")
    folder = {"a wheel": built / "wheel", "a zip on the path": wheel}.get(form, built / "editable")
    said, warned = load(folder, is_site=form == "an editable install")
    assert Path(said).parent == (built / "clone" if form == "an editable install" else folder)
    assert "lowprec" not in warned


@pytest.mark.parametrize("strict", [False, True])
def test_an_editable_install_whose_pth_file_nobody_reads(built, strict):
    assert_lost(built / "editable", strict=strict)


def test_an_editable_install_whose_folder_moved_and_a_half_removed_package(built, tmp_path):
    site = shutil.copytree(built / "editable", tmp_path / "site")
    (finder,) = site.glob("__editable___*_finder.py")
    finder.write_text(finder.read_text().replace(str(built / "clone"), str(tmp_path / "moved")))
    assert_lost(site, is_site=True)
    site = shutil.copytree(built / "wheel", tmp_path / "wheel")
    shutil.rmtree(site / "lightning_lowprec")
    said, warned = load(site)
    assert Path(said).parent == site, "who asks for a name is told that the package cannot be imported"
    assert "lowprec" not in warned
    (site / "lightning_lowprec_autoload.py").write_text("half a file (")
    assert_lost(site, "SyntaxError")


def test_an_editable_install_records_the_file_that_pip_has_to_remove(built):
    (info,) = (built / "editable").glob("*.dist-info")
    (entry,) = [file for file in Distribution.at(info).files if file.name == "lightning_lowprec_entry.py"]
    content = (built / "editable" / entry).read_bytes()
    assert content == (package.ROOT / "lightning_lowprec_entry.py").read_bytes()
    assert entry.size == len(content)
