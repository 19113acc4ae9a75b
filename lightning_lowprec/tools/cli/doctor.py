"""``lowprec doctor``: what this machine can run."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from jsonargparse import ArgumentParser

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.backends import Backend
from lightning_lowprec.extras import INSTALL, import_refusal
from lightning_lowprec.hardware import default_device, describe
from lightning_lowprec.names import TABLE
from lightning_lowprec.private import lightning as lightning_names
from lightning_lowprec.private import torch as torch_names
from lightning_lowprec.private import torchao as torchao_names
from lightning_lowprec.private import transformer_engine as transformer_engine_names
from lightning_lowprec.registration import moved_seams, validate_name
from lightning_lowprec.tools.availability import Availability, availability, survey

LIBRARIES = (torch_names, lightning_names, torchao_names, transformer_engine_names)
"""For each library, the file that knows which of the library's private names this package uses."""


def run(argv: list[str]) -> int:
    """Print the survey, or the verdict on one name; 1 if that one does not run."""
    args = _parser().parse_args(argv)
    device = _device(args.device) if args.device else default_device()
    if args.name is not None:
        return _one(args.name, device, as_json=args.json)
    facts = machine(device)
    verdicts = survey(device)
    if args.json:
        print(json.dumps({**facts, "precisions": [asdict(verdict) for verdict in verdicts]}, indent=2))
    else:
        print(_text(facts, verdicts))
    return 0


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"`device={name!r}` is not available here: {str(error).splitlines()[0]}") from error
    return device


def _one(name: str, device: torch.device, *, as_json: bool) -> int:
    validate_name(name)
    if name not in TABLE:
        print(f"{name} is Lightning's own precision; there is nothing of ours to check.")
        return 0
    verdict = availability(name, device)
    if as_json:
        print(json.dumps(asdict(verdict), indent=2))
    else:
        text = f"{_line(verdict, len(name))}\n{verdict.reason}"
        print(text, file=sys.stdout if verdict.runs else sys.stderr)
    return 0 if verdict.runs else 1


def machine(device: torch.device) -> dict[str, Any]:
    """Device, driver and versions, as plain values."""
    return {
        "device": describe(device),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _packages()},
        "backends": {backend.title: _status(backend) for backend in backends.registered()},
        "moved": [*moved_seams(), *(name for library in LIBRARIES for name in library.moved())],
    }


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.split("\n")[0].strip() or None if result.returncode == 0 else None


def _packages() -> list[str]:
    named = [backend.distribution for backend in backends.registered() if backend.distribution is not None]
    return ["lightning-lowprec", "torch", "lightning", *named, "jsonargparse", "matplotlib"]


def _status(backend: Backend) -> str:
    """Whether a backend's library is there and imports; if not, the reason and what to install, in one line."""
    if backend.module is None:
        return "needs nothing beside torch"
    library = backend.module.partition(".")[0]
    if find_spec(library) is None:
        return f"not installed: `{INSTALL.get(library, f'pip install {backend.distribution}')}`"
    refusal = import_refusal(backend.module, backend.title)
    return "imports" if refusal is None else refusal.splitlines()[0]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _text(facts: dict[str, Any], verdicts: list[Availability]) -> str:
    width = max(len(verdict.name) for verdict in verdicts)
    versions = ", ".join(f"{name} {v or '(not installed)'}" for name, v in facts["versions"].items())
    lines = [
        f"device    {facts['device']}",
        f"driver    {facts['driver'] or 'no NVIDIA driver'}",
        f"versions  python {facts['python']}, {versions}",
        *(f"backend   {title}: {status}" for title, status in facts["backends"].items()),
    ]
    if facts["moved"]:
        lines.append(
            f"warning   the installed libraries are not all supported; they no longer have: {', '.join(facts['moved'])}"
        )
    lines += ["", *(_line(verdict, width) for verdict in verdicts), ""]
    for reason in dict.fromkeys(verdict.reason for verdict in verdicts):
        names = [verdict.name for verdict in verdicts if verdict.reason == reason]
        lines += [f"{reason.rstrip('.')}:", f"    {', '.join(names)}"]
    return "\n".join(lines)


def _line(verdict: Availability, width: int) -> str:
    word = "no" if not verdict.runs else "emulated" if verdict.emulated else "yes"
    return f"{verdict.name:<{width}}  {word:<8}  {verdict.summary}"


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lowprec doctor",
        description="What this machine can run: per precision whether it runs, why not, and what to install.",
    )
    parser.add_argument("--for", dest="name", type=str | None, help="one precision; exits 1 if it does not run here")
    parser.add_argument(
        "--device", type=str | None, help="a torch device such as cpu or cuda:1 (default: the first GPU)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
