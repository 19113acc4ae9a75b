"""``lowprec doctor`` from Python: an object that a notebook shows as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from lightning_lowprec import html
from lightning_lowprec.conversion.name_suffixes import in_words
from lightning_lowprec.extras import quiet
from lightning_lowprec.hardware import default_device
from lightning_lowprec.tools.doctor import Availability, advice, machine, survey, text, word
from lightning_lowprec.tools.recommendation import Recommended


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosis:
    """What runs on one device.

    Args:
        facts: device, driver, versions and backends.
        precisions: the verdict on every name.
    """

    facts: Mapping[str, Any]
    precisions: Sequence[Availability]

    @property
    def recommended(self) -> list[Recommended]:
        """The three precisions to try first, the baseline of a comparison before the others."""
        return advice(self.precisions, self.facts["bf16"])

    def __repr__(self) -> str:
        """Show what ``lowprec doctor`` prints."""
        return text(self.facts, self.precisions)

    def _repr_html_(self) -> str:
        """Show the device, what to try first, and one row per reason."""
        verdicts = self.precisions
        reasons = [("runs", "precisions", "how, or why not")]
        for found, reason in dict.fromkeys((word(verdict), verdict.reason) for verdict in verdicts):
            names = [verdict.name for verdict in verdicts if (word(verdict), verdict.reason) == (found, reason)]
            reasons.append((found, in_words(names), reason))
        advised = [("try first", "why"), *((row.name, row.why) for row in self.recommended)]
        return "".join(
            [
                html.paragraph(f"device: {self.facts['device']}", bold=True),
                html.table(advised),
                html.table(reasons),
                html.small(self._versions()),
                html.bullets(self._warnings()) if self._warnings() else "",
            ]
        )

    def _versions(self) -> str:
        found = {"python": self.facts["python"], **self.facts["versions"]}
        return ", ".join(f"{name} {number or '(not installed)'}" for name, number in found.items())

    def _warnings(self) -> list[str]:
        moved, broken = self.facts["moved"], self.facts["broken"]
        said = [f"the installed libraries are not all supported; they no longer have: {', '.join(moved)}"]
        return said * bool(moved) + [f"{name} is installed and does not import: {why}" for name, why in broken.items()]


def doctor(device: torch.device | str | None = None) -> Diagnosis:
    """Say which precisions run on this machine, why the others do not, and which to try first: ``lowprec doctor``.

    A notebook shows the answer as tables; ``print`` shows what the command prints.

    Args:
        device: a torch device such as ``"cuda:1"``; None: the first GPU, or the CPU where there is no GPU.
    """
    found = default_device() if device is None else torch.device(device)
    with quiet():
        return Diagnosis(facts=machine(found), precisions=survey(found))
