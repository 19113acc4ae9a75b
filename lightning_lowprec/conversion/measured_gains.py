"""Measured gains of FP8 over bf16 by shape, written by ``python -m benchmarks.measured_gains``.

The table is empty: nothing has been measured on a GPU yet, and ``gains`` uses published figures.
"""

SOURCE: str | None = None
GAINS: dict[str, dict[tuple[int, int, int], float]] = {}
"""By recipe: (tokens, in_features, out_features) -> how many times faster than bf16, forward and backward."""
