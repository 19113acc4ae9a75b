"""The file of results: everything that report, pictures and page are made from."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.convergence.gaps import Row, holm, rows

FILE = "results.json"
SCHEMA = 1


@dataclass(frozen=True)
class Results:
    """The content of ``results.json``."""

    data: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Return the results in a folder.

        Raises:
            FileNotFoundError: there are none.
            ValueError: they were written by another version of this program.
        """
        path = folder / FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: the run in this folder has not ended.")
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"{path} has schema {data['schema']}, and {SCHEMA} is read: make the results again.")
        return cls(data)

    def write(self, folder: Path) -> None:
        """Write the file: one run per line, so that a difference of two files can be read."""
        head = {key: value for key, value in self.data.items() if key != "runs"}
        lines = ",\n".join(json.dumps(run) for run in self.data["runs"])
        text = json.dumps(head, indent=1)[:-2] + f',\n "runs": [\n{lines}\n]\n}}\n'
        (folder / FILE).write_text(text, encoding="utf-8")

    @property
    def titles(self) -> dict[str, str]:
        """The names of the subjects in words, by key."""
        return {subject["key"]: subject["title"] for subject in self.data["settings"]["subjects"]}

    def choice(self, key: str) -> str:
        """Return which precisions a subject was trained under."""
        return next(str(s["choice"]) for s in self.data["settings"]["subjects"] if s["key"] == key)

    @property
    def with_suffix(self) -> list[str]:
        """The names that were trained only where every precision was."""
        every = {run["precision"] for run in self.data["runs"] if self.choice(run["subject"]) == "every"}
        some = {run["precision"] for run in self.data["runs"] if self.choice(run["subject"]) == "without suffix"}
        return sorted(every - some) if every and some else []

    @property
    def compared(self) -> list[str]:
        """The subjects without the positive control."""
        return [subject["key"] for subject in self.data["settings"]["subjects"] if subject["choice"] != "control"]

    @cached_property
    def rows(self) -> dict[str, list[Row]]:
        """The rows of each subject, the baseline first."""
        return {key: rows(self.data["runs"], key) for key in self.titles}

    @cached_property
    def comparisons(self) -> dict[tuple[str, str], Row]:
        """Every row that has gaps, by subject and precision, without the positive control."""
        return {(key, row.precision): row for key in self.compared for row in self.rows[key] if len(row.gaps) > 1}

    @cached_property
    def remaining(self) -> set[tuple[str, str]]:
        """Of the comparisons, those that differ after Holm's procedure over all of them."""
        return holm(self.comparisons)

    @cached_property
    def control(self) -> dict[str, Row]:
        """The rows of the positive control that have gaps, by precision."""
        return {
            row.precision: row
            for key in self.titles
            if key not in self.compared
            for row in self.rows[key]
            if len(row.gaps) > 1
        }


def today() -> str:
    """Return the date in UTC."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()
