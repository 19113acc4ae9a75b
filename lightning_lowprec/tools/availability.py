"""Whether a precision runs on a device, and if not, why and what would help."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_lowprec import names as precisions


@dataclass(frozen=True, kw_only=True)
class Availability:
    """The verdict on one name."""

    name: str
    runs: bool
    emulated: bool
    """It runs, but on the arithmetic of another format: for tests, not for speed."""
    reason: str
    """Why it does not run and what to do about it, or how it runs."""
    summary: str
    """What the precision is."""


def availability(name: str, device: torch.device) -> Availability:
    """The verdict on a name of the table, by really importing what it needs and asking the device."""
    summary = precisions.TABLE[name].summary
    try:
        plugin = precisions.create(name)
    except ImportError as error:
        return Availability(name=name, runs=False, emulated=False, reason=str(error), summary=summary)
    refusal = plugin.refusal(device)
    if refusal is not None:
        return Availability(name=name, runs=False, emulated=False, reason=refusal, summary=summary)
    emulated = plugin.emulates(device)
    return Availability(name=name, runs=True, emulated=emulated, reason=plugin.how(device), summary=summary)


def survey(device: torch.device) -> list[Availability]:
    """The verdict on every name, in the table's order."""
    return [availability(name, device) for name in precisions.TABLE]
