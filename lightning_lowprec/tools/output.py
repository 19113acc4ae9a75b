"""What a command prints: tables, strict JSON, and what takes long."""

import json
import math
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from textwrap import wrap
from threading import Timer
from typing import Final, NamedTuple, final

from typing_extensions import Self

APPEARS: Final = 2.0
"""Seconds after which work that goes on is named."""


@contextmanager
def prints_to_stderr(*, wanted: bool = True) -> Iterator[None]:
    """Send what the user's model prints, in processes that it starts too, to stderr, so that stdout is JSON alone."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@final
class working:  # is used like a function
    """Say on stderr what is being done, from the moment on that the block has taken two seconds.

    On a terminal this is said of the block; everywhere, of what ``say`` is given.
    """

    def __init__(self, words: str) -> None:
        self._start = time.monotonic()
        self._words = words
        self._timer = Timer(APPEARS, lambda: self.say(self._words))

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def say(self, words: str) -> None:
        """Name the work that begins now, or that goes on."""
        self._words = words
        if time.monotonic() - self._start >= APPEARS:
            self._timer.cancel()  # it would say the same again
            print(f"{words} ...", file=sys.stderr, flush=True)


# ---- lines, tables and JSON

WIDTH: Final = 100


def folded(lines: Iterable[str]) -> list[str]:
    """Return lines of at most ``WIDTH`` columns. What is between backticks, a command, stays in one piece."""
    short: list[str] = []
    for line in lines:
        words = re.sub("`[^`]*`", lambda quoted: quoted[0].replace(" ", "\0"), line)
        indent = re.match(r" *(?:\S+ ?\S* {2,})*", line)
        space = " " * max(len(indent[0]) if indent else 0, 4)
        cut = wrap(words, WIDTH, subsequent_indent=space, break_long_words=False, break_on_hyphens=False)
        short += [part.replace("\0", " ") for part in cut] or [""]
    return short


def format_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), markdown: bool = False) -> list[str]:
    """Return one line per row; Markdown, which is escaped in the cells, has one line more, below the header.

    All rows have one length, and the first is the header. ``right`` has the columns that are aligned to the right.
    """
    if markdown:
        rows = [[re.sub(r"([\\`*|<])", r"\\\1", cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)]
        lines.append(f"| {' | '.join(cells)} |" if markdown else "  ".join(cells).rstrip())
    if markdown:
        rule = "|".join("-" * (width + 1) + (":" if i in right else "-") for i, width in enumerate(widths))
        lines.insert(1, f"|{rule}|")
    return lines


class Table(NamedTuple):
    """Rows of cells, the header first."""

    rows: Sequence[Sequence[str]]
    words: Collection[int] = (0,)
    """The columns that are aligned to the left; numbers stand in the others."""


def page(parts: Sequence[Table | Sequence[str]]) -> str:
    """Return tables and groups of lines as text, an empty line between them; the lines are folded."""
    texts = []
    for part in parts:
        if isinstance(part, Table):
            right = [column for column in range(len(part.rows[0])) if column not in part.words]
            texts.append("\n".join(format_table(part.rows, right=right)))
        elif part:
            texts.append("\n".join(folded(part)))
    return "\n\n".join(texts)


def dumps(value: object) -> str:
    """Return a value as JSON, with null for every float that is not finite."""
    return json.dumps(finite(value), indent=1, allow_nan=False, default=str)


def finite(value: object) -> object:
    """Return mappings, lists and tuples with None in place of every float that is not finite."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
