"""Check whether a precision runs on a device, and if not, why and what would help."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_lowprec import names as precisions


@dataclass(frozen=True, kw_only=True)
class Availability:
    """The verdict on one name.

    Args:
        name: the precision.
        runs: whether it runs.
        emulated: it runs, but on the arithmetic of another format: for tests, not for speed.
        reason: how it runs; or why it does not run, and a remedy.
        summary: a description of the precision.
    """

    name: str
    runs: bool
    emulated: bool = False
    reason: str
    summary: str


def availability(name: str, device: torch.device) -> Availability:
    """Judge a name of the table: really import the packages that it needs, and ask the device."""
    summary = precisions.TABLE[name].summary
    try:
        plugin = precisions.create(name)
    except ImportError as error:
        return Availability(name=name, runs=False, reason=str(error), summary=summary)
    refusal = plugin.refusal(device)
    if refusal is not None:
        return Availability(name=name, runs=False, reason=refusal, summary=summary)
    emulated = plugin.emulates(device)
    return Availability(name=name, runs=True, emulated=emulated, reason=plugin.how(device), summary=summary)


def survey(device: torch.device) -> list[Availability]:
    """Judge every name, in the order of the table."""
    return [availability(name, device) for name in precisions.TABLE]
