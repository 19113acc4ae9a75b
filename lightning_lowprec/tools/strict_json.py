"""Values as strict JSON, which knows no NaN and no infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any) -> str:
    """Return a value as JSON, with null for every float that is not finite."""
    return json.dumps(finite(value), indent=1, allow_nan=False)


def finite(value: Any) -> Any:
    """Return mappings, lists and tuples with None in place of every float that is not finite."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
