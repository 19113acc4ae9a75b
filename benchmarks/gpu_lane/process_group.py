"""A process group and its environment variables belong to one item: the next one finds none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""What Lightning and torch's launchers write."""


@contextmanager
def left_as_found() -> Iterator[None]:
    """End the group that was made inside, and put its variables back.

    Who comes next in the same process (Accelerate, another strategy) would believe that it is one of several, or bind
    the port again.
    """
    had_group = dist.is_initialized()
    before = {name: os.environ.get(name) for name in VARIABLES}
    try:
        yield
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
