"""What a tensor subclass asks about an operation that it is shown (``__torch_dispatch__``)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


@functools.cache
def _write_positions(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that ``func`` writes to."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in _write_positions(func)]
