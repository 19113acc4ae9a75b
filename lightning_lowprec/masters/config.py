"""Where float32 masters and optimizer moments are stored between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_lowprec.checks import Count, check_fields

MasterForm = Literal["fp32", "remainder", "stochastic"]
MomentForm = Literal["fp32", "stochastic"]


@dataclass(frozen=True, kw_only=True)
class MasterConfig:
    """The form of the masters between steps; :mod:`~lightning_lowprec.masters.stores` explains the forms."""

    form: MasterForm = "fp32"
    """``"fp32"`` (4 bytes per parameter), ``"remainder"`` (exact, 2 bytes) or ``"stochastic"`` (none, 0 bytes).

    The last two need bf16 parameters.
    """
    moments: MomentForm = "fp32"
    """``"stochastic"`` keeps the optimizer's state of bf16 parameters in bf16, rounded stochastically."""
    seed: int = 0
    """The seed of stochastic rounding; the same on every rank."""

    bucket_bytes: Count = 256 * 2**20
    """The bytes of float32 masters that a step loads at a time; a larger parameter is loaded alone.

    It does not matter where a kernel steps in one pass (see docs/speed.md), and for optimizers that need all
    parameters at once.
    """

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self)
        if self.moments == "stochastic" and self.form != "stochastic":
            raise ValueError(f"`moments='stochastic'` goes with `form='stochastic'` only, got `form={self.form!r}`.")

    @classmethod
    def of(cls, value: MasterForm | MasterConfig) -> MasterConfig:
        """Return a config as given, and a form as a config."""
        return value if isinstance(value, MasterConfig) else cls(form=value)
