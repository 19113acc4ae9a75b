"""One row of a plan: a weight of the model, and whether the weight converts."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_lowprec.conversion.matmuls import Matmul


@dataclass(frozen=True, kw_only=True)
class PlanRow(Matmul):
    """One weight of the model, and whether the weight converts."""

    kept_because: str | None
    """The reason why the weight stays in high precision; None: the weight converts."""
    gain: float | None
    """Expected speed of FP8 over bf16 for this shape (see ``gains``); None: slower than bf16."""
    trains: bool
    """Whether the weight has a gradient: a frozen weight skips the GEMM of the weight gradient."""
    recipe: str | None = None
    """With recipes per layer, the recipe of a weight that converts, in words; None: one recipe for all."""
    padded_to: tuple[int, int] | None = None
    """In and out features with the zeros that ``pad_inner_dim`` appends, whether on or not; None: it appends none."""
    runs_in: str | None = None
    """The dtype in which a kept weight multiplies: ``"bf16"``; None: the weight converts, or the model decides."""

    @property
    def slower(self) -> bool:
        """Whether FP8 is expected to lose against bf16 at this shape."""
        return self.gain is None or self.gain < 1.0

    @property
    def kept(self) -> str:
        """The reason and the dtype of a kept weight: ``kept: output head (by name), bf16``."""
        text = f"kept: {self.kept_because}{f', {self.runs_in}' if self.runs_in else ''}"
        return f"{text} (`pad_inner_dim=True`: {self.padding})" if self.padded_to else text

    @property
    def padding(self) -> str:
        """The zeros of ``pad_inner_dim`` and their cost in words: ``padded to 304 -> 304, 2.7% more FLOPs``."""
        if self.padded_to is None:
            return ""
        wide, high = self.padded_to
        more = wide * high / (self.in_features * self.out_features) - 1
        return f"padded to {wide} -> {high}, {more:.1%} more FLOPs"

    @property
    def shape(self) -> str:
        """The shape in words: ``4096 -> 11008``, of stacked experts ``4096 -> 11008 x 8``."""
        return f"{self.in_features} -> {self.out_features}" + (f" x {self.stored}" if self.stored > 1 else "")
