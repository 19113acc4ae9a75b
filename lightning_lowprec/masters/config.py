"""Where float32 masters and optimizer moments are stored between steps."""

from dataclasses import dataclass
from typing import Literal

from lightning_lowprec.conversion.options import shows

MasterForm = Literal["fp32", "remainder", "stochastic"]
Kept = Literal[MasterForm, "8bit"]
MomentForm = Literal["fp32", "8bit"]


@shows()
@dataclass(frozen=True, kw_only=True)
class MasterConfig:
    """The form of the masters between steps; :mod:`~lightning_lowprec.masters.stores` explains the forms."""

    form: MasterForm = "fp32"
    """``"fp32"`` (4 bytes per parameter), ``"remainder"`` (exact, 2 bytes) or ``"stochastic"`` (none, 0 bytes).

    The last two need bf16 parameters.
    """
    moments: MomentForm = "fp32"
    """How the optimizer's state of half-precision parameters is kept between steps.

    ``"fp32"``: as it is, 4 bytes per number. ``"8bit"``: 1 byte, and an exponent per 32 to 256 numbers, rounded
    stochastically: first moments in float8_e4m3fn, second moments in 5 bits of exponent and 3 of mantissa. Parameters
    of one dimension, of less than 4,096 numbers, or with rows that are not multiples of 32 keep float32 state.
    """
    seed: int = 0
    """The seed of stochastic rounding; the same on every rank."""

    @property
    def rounds(self) -> bool:
        """Whether something is rounded stochastically, so that steps are counted."""
        return self.form == "stochastic" or self.moments != "fp32"

    @property
    def kept(self) -> Kept:
        """The word for what is kept between steps: the form, or ``"8bit"`` if remainders and 8-bit moments are."""
        return "8bit" if (self.form, self.moments) == ("remainder", "8bit") else self.form

    @property
    def words(self) -> str:
        """What is kept beside half-precision weights, for the log."""
        masters = {
            "fp32": "float32 masters in the optimizer",
            "remainder": "exact float32 masters in 2 more bytes per parameter",
            "stochastic": "no masters, updates rounded stochastically",
        }
        return masters[self.form] + (", moments of 8 bits" if self.moments == "8bit" else "")

    @classmethod
    def of(cls, value: "Kept | MasterConfig") -> "MasterConfig":
        """Return a config as given, and a word for what is kept as a config."""
        if isinstance(value, MasterConfig):
            return value
        return cls(form="remainder", moments="8bit") if value == "8bit" else cls(form=value)
