"""How a training process tells its parent where it is, on a stdout that the user's model may print to as well."""

from __future__ import annotations

import json
import sys
from typing import Any

MARK = "\x1elowprec "
"""Starts a message that runs to the end of its line; 0x1e is ASCII's record separator (cf. RFC 7464)."""


def send(**message: Any) -> None:
    """Write one message to stdout, whole, at once."""
    sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


def receive(line: str) -> tuple[str, dict[str, Any] | None]:
    """Take a line of a child's stdout apart: what the user's code printed, and our message if there is one."""
    text, mark, message = line.partition(MARK)
    if not mark:
        return line, None
    try:
        return text, dict(json.loads(message))
    except ValueError:  # another thread wrote into the middle of it
        return line, None
