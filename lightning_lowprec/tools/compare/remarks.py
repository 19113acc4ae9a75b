"""What a reader must know before reading the figures of a comparison."""

from __future__ import annotations

from lightning_lowprec.tools.compare.result import Comparison


def remarks(comparison: Comparison) -> list[str]:
    """One sentence each, the most important first."""
    trained = [result for result in comparison.results if result.device_type == "cpu"]
    found = []
    if any("fp8" in result.name or "fp4" in result.name for result in trained):
        found.append(
            "This ran on a CPU, where FP8 is emulated: the losses show what FP8's rounding does to this training, but"
            " the step times and the memory say nothing about a GPU."
        )
    elif trained:
        found.append("This ran on a CPU: the step times and the memory say nothing about a GPU.")
    if len(comparison.results) == 1:
        found.append("Only one precision was asked for, so nothing was compared.")
    return found
