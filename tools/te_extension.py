"""Print the path of a wheel of `transformer-engine-torch` for the Python that runs this, building it once if need be.

    .venv-te/bin/python tools/te_extension.py 2.20.2      # the environment holds torch and transformer-engine-cu13

The extension is published as source only: 33 C++ files, no nvcc, about 17 minutes on 2 cores. Looked for, in this
order: the folder $TE_WHEELS; the cache, ~/.cache/lightning_lowprec; else it is built, and put into the cache. A wheel
says nothing of the torch it was built against, so the cache has a folder for each.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

NAME = "transformer_engine_torch"
HEADERS = ("nvidia/nccl", "nvidia/cudnn", "nvidia/cu13")  # the wheels that bring CUDA's headers
BUILD_NEEDS = (
    "setuptools",
    "wheel",
    "ninja",
    "packaging",
    "pybind11",
    "cmake",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
)


def main(version: str) -> int:
    """Find it or build it."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    torch_version = importlib.metadata.version("torch")
    cache = Path.home() / ".cache" / "lightning_lowprec" / f"torch-{torch_version}"
    given = os.environ.get("TE_WHEELS")
    for folder in (Path(given) if given else None, cache):
        found = sorted(folder.glob(f"{NAME}-{version}-{tag}-*.whl")) if folder is not None else []
        if found:
            print(found[-1].resolve())
            return 0
    print(f"No wheel of {NAME} {version} for {tag} in {given or '$TE_WHEELS (not set)'}", file=sys.stderr)
    print(f"nor in the cache: building it for torch {torch_version}, about 17 minutes on 2 cores ...", file=sys.stderr)
    cache.mkdir(parents=True, exist_ok=True)
    build(version, cache)
    print(sorted(cache.glob(f"{NAME}-{version}-{tag}-*.whl"))[-1].resolve())
    return 0


def build(version: str, into: Path) -> None:
    """Build it from source into the folder ``into``."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", *BUILD_NEEDS], check=True, stdout=sys.stderr)
    packages = Path(sysconfig.get_paths()["purelib"])
    includes = [str(folder) for name in HEADERS if (folder := packages / name / "include").is_dir()]
    environment = {
        **os.environ,
        "NVTE_FRAMEWORK": "pytorch",
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count() or 1)),
        "CPATH": os.pathsep.join([*includes, os.environ.get("CPATH", "")]).rstrip(os.pathsep),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # ninja
    }
    source = f"{NAME.replace('_', '-')}=={version}"
    options = ["--no-build-isolation", "--no-deps", "--no-binary", NAME, "--wheel-dir", str(into)]
    subprocess.run([*pip, "wheel", *options, source], check=True, env=environment, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
