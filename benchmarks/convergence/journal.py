"""The file of finished runs: one line of JSON each, so that a run that was interrupted goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "runs.jsonl"

Key = tuple[str, str, int]
"""Subject, precision, seed."""


class Journal:
    """The finished runs in a folder. The first line has the settings, which must be those of the new run.

    Args:
        folder: the folder; it is made.
        settings: everything that the result of a run depends on.
        commit: the commit of this call; those of all calls are kept.

    Raises:
        ValueError: the folder has runs with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], commit: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self.runs: dict[Key, dict[str, Any]] = {}
        self.bases: dict[tuple[str, int], dict[str, Any]] = {}
        self.seconds = 0.0
        self.commits: list[str] = []
        wanted = json.loads(json.dumps(settings))
        lines = [json.loads(line) for line in self._whole_lines()] if self.path.exists() else []
        if lines:
            _check(lines[0]["settings"], wanted, self.path)
        else:
            self._write({"settings": wanted})
        for line in lines[1:]:
            self._take(line)
        if commit and commit not in self.commits:
            self._append({"commit": commit})

    def add_run(self, record: dict[str, Any]) -> None:
        """Add a finished run."""
        self._append({"run": record})

    def add_base(self, record: dict[str, Any]) -> None:
        """Add the facts about the weights that a fine-tune begins with.

        Raises:
            RuntimeError: an earlier call got other weights from the same seed.
        """
        key = record["subject"], record["seed"]
        before = self.bases.get(key)
        if before is None:
            self._append({"base": record})
        elif before["sha256"] != record["sha256"]:
            raise RuntimeError(
                f"The base weights of {key[0]} with seed {key[1]} are not those of the runs in {self.path}: this"
                " machine does not repeat its results. Give another folder by --out."
            )

    def add_seconds(self, seconds: float) -> None:
        """Add the time that a call took."""
        self._append({"seconds": round(seconds, 1)})

    def _append(self, line: dict[str, Any]) -> None:
        self._take(line)
        self._write(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "run" in line:
            run = line["run"]
            self.runs[run["subject"], run["precision"], run["seed"]] = run
        elif "base" in line:
            self.bases[line["base"]["subject"], line["base"]["seed"]] = line["base"]
        elif "commit" in line:
            self.commits.append(line["commit"])
        else:
            self.seconds += line["seconds"]

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _whole_lines(self) -> list[str]:
        """Return the lines, and cut off a last line that was not written to its end."""
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")
        return whole.splitlines()


def _check(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    differ = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if differ:
        raise ValueError(
            f"{path} has runs with other settings ({', '.join(differ)}), which cannot be compared with new runs. Give"
            " another folder by --out, or --force to delete these runs."
        )
