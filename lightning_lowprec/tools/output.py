"""What a command prints: tables, strict JSON, and on a terminal colours and progress."""

import json
import math
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from textwrap import wrap
from threading import Event, Thread
from typing import Any, Final, Literal, TextIO, final

from tqdm import tqdm
from typing_extensions import Self

Colour = Literal["red", "green", "yellow"]
_CODES: Final = {"red": 31, "green": 32, "yellow": 33}
APPEARS: Final = 2.0
"""Seconds after which work that goes on is shown."""
_EVERY: Final = 1.0  # seconds between two updates of the line


def paint(text: str, colour: Colour, stream: TextIO) -> str:
    """Return the text in a colour if the stream is a terminal that shows colours and ``NO_COLOR`` is not set."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


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
    """Show on stderr what is being done, from the moment on that the block has taken two seconds.

    On a terminal this is one line with the time, and with a bar if ``total`` is given. Elsewhere only what ``say`` is
    given is written.
    """

    def __init__(self, words: str, total: int | None = None) -> None:
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._end = Event()
        form = "{desc} ... {elapsed}" if total is None else "{desc} {percentage:3.0f}%|{bar}| {n}/{total} {elapsed}"
        self._bar = tqdm(
            total=total, desc=words, bar_format=form, leave=False, delay=APPEARS, disable=not self._terminal,
            dynamic_ncols=True,
        )  # fmt: skip
        self._thread = Thread(target=self._refresh, daemon=True)

    def __enter__(self) -> Self:
        if self._terminal:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._terminal:
            self._thread.join()
        self._bar.close()

    def say(self, words: str) -> None:
        """Name the work that begins now."""
        if self._terminal:
            self._bar.set_description_str(words, refresh=self._late)
        elif self._late:
            print(f"{words} ...", file=sys.stderr, flush=True)

    def advance(self) -> None:
        """Count one part of the work as done."""
        self._bar.update()

    @property
    def _late(self) -> bool:
        return time.monotonic() - self._start > APPEARS

    def _refresh(self) -> None:
        """Draw the line again and again: one call of another library may take longer than two seconds."""
        wait = APPEARS
        while not self._end.wait(wait):
            self._bar.delay, wait = 0, _EVERY  # with a delay, tqdm would not clear the line at the end
            self._bar.refresh()


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


def dumps(value: object) -> str:
    """Return a value as JSON, with null for every float that is not finite."""
    return json.dumps(finite(value), indent=1, allow_nan=False, default=str)


def finite(value: Any) -> Any:
    """Return mappings, lists and tuples with None in place of every float that is not finite."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
