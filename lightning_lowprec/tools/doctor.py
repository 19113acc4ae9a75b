"""``lowprec doctor``: the precisions that run on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch
from jsonargparse import ArgumentParser

from lightning_lowprec.hardware import default_device
from lightning_lowprec.names import TABLE
from lightning_lowprec.registration import validate_name
from lightning_lowprec.tools.availability import Availability, availability, survey
from lightning_lowprec.tools.machine import machine


def run(argv: list[str]) -> int:
    """Print the verdict on every name, or on one name; return 1 if that name does not run."""
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
        print(f"{name} is Lightning's own precision; lightning_lowprec has nothing to check.")
        return 0
    verdict = availability(name, device)
    if as_json:
        print(json.dumps(asdict(verdict), indent=2))
    else:
        text = f"{_line(verdict, len(name))}\n{verdict.reason}"
        print(text, file=sys.stdout if verdict.runs else sys.stderr)
    return 0 if verdict.runs else 1


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
        description="Print for every precision whether it runs on this machine, why not, and what to install.",
    )
    parser.add_argument(
        "--for", dest="name", type=str | None, help="check one precision; the exit status is 1 if it does not run here"
    )
    parser.add_argument(
        "--device", type=str | None, help="a torch device such as cpu or cuda:1 (default: the first GPU)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
