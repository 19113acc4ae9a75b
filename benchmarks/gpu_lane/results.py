"""``results.json``: every raw figure with its origin, written after every item, merged across calls."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
FILE = "results.json"
OK, FAILED, MISSING, NOT_REACHED = "ok", "failed", "missing", "not reached"
RANK = {NOT_REACHED: 0, MISSING: 1, FAILED: 2, OK: 3}
"""Of two entries of one item the higher rank stays; of equals the later."""


class Results:
    """The figures of one output folder; what is there already is kept and continued."""

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        fresh: dict[str, Any] = {"schema": SCHEMA, "runs": [run], "parts": {}}
        path = folder / FILE
        self.data = merge([json.loads(path.read_text()), fresh]) if path.exists() else fresh
        self.save()

    def part(self, name: str) -> dict[str, Any]:
        """The part's dictionary, made if it is new."""
        part: dict[str, Any] = self.data["parts"].setdefault(name, {"seconds": 0.0, "items": {}})
        return part

    def done(self, part: str, key: str) -> bool:
        """Whether an earlier call has the figures already."""
        return self.status(part, key) == OK

    def status(self, part: str, key: str) -> str | None:
        """How an earlier call ended."""
        status: str | None = self.part(part)["items"].get(key, {}).get("status")
        return status

    def batch(self, part: str) -> int | None:
        """The batch that an earlier call measured with: figures of another one compare with nothing."""
        found = (entry["figures"].get("batch") for entry in self.part(part)["items"].values() if entry["status"] == OK)
        return next((batch for batch in found if batch is not None), None)

    def record(self, part: str, key: str, entry: dict[str, Any]) -> None:
        """Keep an entry and write the file."""
        self.part(part)["items"][key] = clean(entry)
        self.save()

    def add_seconds(self, part: str, seconds: float, settings: dict[str, Any]) -> None:
        """What a part took in this call, and its settings."""
        row = self.part(part)
        row["seconds"] = round(row["seconds"] + seconds, 1)
        row["settings"] = settings
        self.save()

    def save(self) -> None:
        """Whole or not at all: a killed process leaves the last good file."""
        temporary = self.folder / f".{FILE}"
        temporary.write_text(json.dumps(self.data, indent=1))
        os.replace(temporary, self.folder / FILE)


def clean(value: Any) -> Any:
    """Plain JSON: NaN and infinities as words, everything unknown as text."""
    if isinstance(value, dict):
        return {str(key): clean(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def merge(several: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One set of results out of several of the same device and kind.

    Raises:
        ValueError: results of different devices, or figures that mean nothing beside real ones.
    """
    kinds = {(run["machine"].get("device"), means_nothing(run)) for data in several for run in data["runs"]}
    if len(kinds) > 1:
        raise ValueError(
            "results of different devices or kinds do not merge: "
            + "; ".join(f"{device}{f' ({why})' if why else ''}" for device, why in sorted(kinds, key=str))
        )
    merged: dict[str, Any] = {"schema": SCHEMA, "runs": [], "parts": {}}
    for data in several:
        merged["runs"] += data["runs"]
        for name, part in data["parts"].items():
            into = merged["parts"].setdefault(name, {"seconds": 0.0, "items": {}})
            into["seconds"] = round(into["seconds"] + part["seconds"], 1)
            into["settings"] = part.get("settings", into.get("settings"))
            for key, entry in part["items"].items():
                old = into["items"].get(key)
                if old is None or RANK[entry["status"]] >= RANK[old["status"]]:
                    into["items"][key] = entry
    return merged


def folder_name(data: dict[str, Any]) -> str:
    """Device and newest date, as committed results are named: ``h200-2026-11-30``.

    Raises:
        ValueError: figures that mean nothing, which are not committed.
    """
    why = next(filter(None, map(means_nothing, data["runs"])), "")
    if why:
        raise ValueError(f"figures of {why} mean nothing: name a folder for them with --out.")
    words = str(data["runs"][-1]["machine"].get("device")).lower().removeprefix("nvidia").split()
    return "-".join([re.sub(r"[^a-z0-9]+", "-", words[0]), max(run["date"] for run in data["runs"])])


def means_nothing(run: dict[str, Any]) -> str:
    """Return why the figures of a run mean nothing; an empty text if they mean what they say."""
    if not run.get("values", True):
        return "a device that computes nothing"
    return "toy sizes (`--smoke`)" if run["smoke"] else ""


def figures_of(data: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    """The figures of every finished item of a part, by key."""
    items = data["parts"].get(part, {}).get("items", {})
    return {key: entry["figures"] for key, entry in items.items() if entry["status"] == OK}
