"""What FP8 gains over bf16 by shape, as measured here: written by ``python -m benchmarks.measured_gains``.

Empty: nothing has been measured on a GPU yet, and published figures stand in (see ``gains``).
"""

from __future__ import annotations

SOURCE: str | None = None
GAINS: dict[str, dict[tuple[int, int, int], float]] = {}
"""By recipe: (tokens, in_features, out_features) -> how many times faster than bf16, forward and backward."""
