"""Build the null GPU: two libraries, from this folder's C++ and the headers of the wheels beside torch's CUDA build.

python -m benchmarks.ledger.build         # a few seconds; does nothing if the libraries are newer than the sources
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "nullgpu"
OUT = HERE.parents[1] / ".nullgpu"
RUNTIME = ("records", "device", "memory", "streams", "kernels", "runtime", "blas", "blaslt")
LIBRARIES = ("libcuda.so", "libnullgpu.so", "libcuda.so.1")
NEEDED_HEADERS = (
    "cuda.h",
    "cuda_runtime_api.h",
    "cublas_v2.h",
    "cublasLt.h",
    "crt/host_defines.h",
    "cccl/cuda/std/version",
)
FLAGS = ("-O1", "-fPIC", "-std=c++17", "-Wall", "-Wno-unused-function")


class CannotBuild(RuntimeError):
    """Something that the null GPU is built from is missing; the text says what to install."""


def packages() -> Path:
    """Return the folder of this Python's packages."""
    return Path(sysconfig.get_paths()["purelib"])


def headers() -> Path:
    """Return the folder of CUDA's headers; raises CannotBuild if one is missing."""
    folder = packages() / "nvidia" / "cu13" / "include"
    missing = [name for name in NEEDED_HEADERS if not (folder / name).exists()]
    if missing:
        raise CannotBuild(
            f"The null GPU needs CUDA 13's headers; not found: {', '.join(missing)}. They come with a CUDA build of"
            " torch and two wheels: python -m pip install torch==2.11.0 'nvidia-cuda-crt==13.0.*'"
            " 'nvidia-cuda-cccl==13.0.*'."
            " `make ledger` sets up such an environment, .venv-te."
        )
    return folder


def compiler() -> str:
    """Return the path of g++; raises CannotBuild if there is none."""
    found = shutil.which("g++")
    if found is None:
        raise CannotBuild(
            "The null GPU is compiled by g++, which was not found. Install it (Debian, Ubuntu: apt install g++)."
        )
    return found


def build(out: Path = OUT) -> Path:
    """Build the libraries into the folder ``out`` unless they are up to date, and return the folder.

    Several processes may call this function at once: one of them builds, and the others wait.
    """
    include, gpp = headers(), compiler()
    newest = max(path.stat().st_mtime for path in (*SOURCES.iterdir(), Path(__file__)))

    def up_to_date() -> bool:
        return all((out / name).exists() and (out / name).stat().st_mtime >= newest for name in LIBRARIES)

    if up_to_date():
        return out
    out.mkdir(exist_ok=True)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not up_to_date():
            with tempfile.TemporaryDirectory(dir=out) as folder:
                compile_and_link(Path(folder), include, gpp)
                for name in LIBRARIES:
                    os.replace(Path(folder) / name, out / name)
    return out


def compile_and_link(out: Path, include: Path, gpp: str) -> None:
    """Write the libraries and all that leads to them into the folder ``out``."""
    own = [SOURCES / f"{name}.cpp" for name in RUNTIME]
    generated = {
        "runtime_stubs": ("cuda_runtime_api.h", "cudaError_t", 801, own),
        "blas_stubs": ("cublas_api.h", "cublasStatus_t", 15, own),
        "driver_stubs": ("cuda.h", "CUresult", 801, [SOURCES / "driver.cpp"]),
    }
    for name, (header, kind, status, defining) in generated.items():
        command = [sys.executable, SOURCES / "stubs.py", include / header, kind, str(status), *defining]
        (out / f"{name}.cpp").write_text(subprocess.run(command, check=True, text=True, capture_output=True).stdout)
    flags = [*FLAGS, f"-I{include}", f"-I{include / 'cccl'}", f"-I{SOURCES}"]
    everything = [*own, SOURCES / "driver.cpp", *(out / f"{name}.cpp" for name in generated)]

    def compiled(source: Path) -> Path:
        target = out / f"{source.stem}.o"
        run([gpp, *flags, "-c", source, "-o", target])
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = dict(zip([s.stem for s in everything], pool.map(compiled, everything), strict=True))
    of_driver = {"driver", "driver_stubs"}
    mine = [path for stem, path in objects.items() if stem not in of_driver]
    run([gpp, "-shared", "-o", out / "libnullgpu.so", *mine, "-ldl", "-lpthread"])
    linked = [objects[stem] for stem in sorted(of_driver)]
    run([gpp, "-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-rpath,$ORIGIN", f"-L{out}", "-o", out / "libcuda.so.1",
         *linked, "-lnullgpu", "-ldl"])  # fmt: skip
    (out / "libcuda.so").symlink_to("libcuda.so.1")


def run(command: list[object]) -> None:
    """Run a command; raises CannotBuild with its output if it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"{' '.join(map(str, command[:2]))} ... failed:\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    try:
        print(build())
    except CannotBuild as error:
        sys.exit(str(error))
