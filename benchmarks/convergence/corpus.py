"""The text: sources of the installed packages, in one file that the trainings map into memory.

Files are ordered by a hash of their paths, so that a limit in bytes takes a little of every package. One file in
twenty, chosen by the same hash, is for validation. A file whose content was seen before is left out: a licence that
many packages carry would otherwise be in both parts.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

KINDS = {
    "prose": (".md", ".rst", ".txt", "METADATA"),
    "python": (".py", ".pyi"),
    "c": (".c", ".h", ".cpp", ".hpp", ".cuh"),
}
"""Kinds of text, by how the name of a file ends."""
VAL_SHARE = 20
"""One file in so many is for validation."""
LEAST = 1000
"""Bytes that a part of the text must have."""
PACKAGES = Path(sysconfig.get_paths()["purelib"])
"""The folder of the installed packages."""

Span = tuple[int, int]
"""The first byte, and the first byte behind."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text in one file: first all that is for training, then all that is for validation, each sorted by kind."""

    path: Path
    files: int
    bytes: int
    digest: str
    """SHA-256 of the file."""
    spans: dict[str, dict[str, Span]]
    """Where each kind of text lies, by ``train`` and ``val``."""

    def span(self, part: str, kind: str | None = None) -> Span:
        """Return where a part of the text lies: one kind, or all kinds.

        Raises:
            ValueError: there is too little of it.
        """
        spans = self.spans[part]
        found = spans[kind] if kind else (min(first for first, _ in spans.values()), max(e for _, e in spans.values()))
        if found[1] - found[0] < LEAST:
            raise ValueError(
                f"The text has {found[1] - found[0]} bytes of {kind or 'all kinds'} for {part}; {LEAST} are needed."
            )
        return found

    def facts(self) -> dict[str, object]:
        """Return what a reader needs to see whether the text of another machine is the same."""
        sizes = {
            part: {kind: end - first for kind, (first, end) in spans.items()} for part, spans in self.spans.items()
        }
        return {"files": self.files, "bytes": self.bytes, "sha256": self.digest, "bytes_by_part": sizes}


def kind_of(name: str) -> str | None:
    """Return the kind of a file, or None if it is not text of a kind that counts."""
    return next((kind for kind, ends in KINDS.items() if name.endswith(ends)), None)


def rank(name: str) -> int:
    """Return the hash of a path, relative to the folder of packages, that orders and splits the files."""
    return zlib.crc32(name.encode())


def part_of(name: str) -> str:
    """Return whether a file is for training or for validation."""
    return "val" if rank(name) % VAL_SHARE == 0 else "train"


def sources(folder: Path) -> list[str]:
    """Return the paths of all sources below a folder, relative to the folder, in the order in which they count."""
    return sorted(_names(folder), key=lambda name: (rank(name), name))


def _names(folder: Path) -> Iterator[str]:
    for parent, _, files in os.walk(folder):
        for file in files:
            if kind_of(file):
                yield Path(parent, file).relative_to(folder).as_posix()


def texts(folder: Path, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield paths and contents, up to the first file that does not fit into ``max_bytes``, no content twice.

    Files that are empty or hold a zero byte are no text, and are left out.
    """
    seen: set[bytes] = set()
    for name in sources(folder):
        content = (folder / name).read_bytes()
        if len(content) > max_bytes:
            return
        of_content = hashlib.sha256(content).digest()
        if content and b"\0" not in content and of_content not in seen:
            seen.add(of_content)
            max_bytes -= len(content)
            yield name, content


def collect(out: Path, max_bytes: int, folder: Path = PACKAGES) -> Corpus:
    """Write the text to ``out``, at most ``max_bytes``, and return what lies where."""
    chosen: dict[tuple[str, str], list[str]] = {(part, kind): [] for part in ("train", "val") for kind in KINDS}
    size = 0
    for name, content in texts(folder, max_bytes):
        size += len(content)
        chosen[part_of(name), kind_of(name) or ""].append(name)
    digest = hashlib.sha256()
    spans: dict[str, dict[str, Span]] = {"train": {}, "val": {}}
    with out.open("wb") as file:
        for (part, kind), names in chosen.items():
            first = file.tell()
            _append(file, digest, [folder / name for name in names])
            spans[part][kind] = first, file.tell()
    files = sum(map(len, chosen.values()))
    return Corpus(path=out, files=files, bytes=size, digest=digest.hexdigest(), spans=spans)


def _append(file: BinaryIO, digest: hashlib._Hash, paths: list[Path]) -> None:
    for path in paths:
        content = path.read_bytes()
        digest.update(content)
        file.write(content)
