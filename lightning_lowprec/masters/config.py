"""Where float32 masters and optimizer moments are stored between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from lightning_lowprec.checks import PositiveOrNone
from lightning_lowprec.conversion.options import shows

MasterForm = Literal["fp32", "remainder", "remainder8", "stochastic"]
Kept = Literal[MasterForm, "8bit"]
MomentForm = Literal["fp32", "8bit"]
Update = Literal["step", "backward", "moments"]


@shows()
@dataclass(frozen=True, kw_only=True)
class MasterConfig:
    """The form of the masters between steps; :mod:`~lightning_lowprec.masters.stores` explains the forms."""

    form: MasterForm = "fp32"
    """``"fp32"`` (4 bytes per parameter), ``"remainder"`` (exact, 2 bytes), ``"remainder8"`` (1 byte: 24 bits of
    float32, rounded stochastically) or ``"stochastic"`` (none, 0 bytes).

    The last three need bf16 parameters.
    """
    moments: MomentForm = "fp32"
    """How the optimizer's state of half-precision parameters is kept between steps.

    ``"fp32"``: as it is, 4 bytes per number. ``"8bit"``: 1 byte, and an exponent per 32 to 256 numbers, rounded
    stochastically: first moments in float8_e4m3fn, second moments in 5 bits of exponent and 3 of mantissa. Parameters
    of one dimension, of less than 4,096 numbers, or with rows that are not multiples of 32 keep float32 state.
    """
    update: Update = "step"
    """``"backward"`` updates a parameter as soon as its gradient is complete, and frees the gradient.

    ``"moments"`` then adds the gradient to the moments of Adam or AdamW, and updates in the step: several backward
    passes accumulate without a buffer (AdamA, arXiv 2305.19982). See docs/memory.md for what both cannot do.
    """
    clip_tensor: PositiveOrNone = None
    """With ``update="backward"``: the largest norm of the gradient of one parameter; a larger one is scaled down."""
    seed: int = 0
    """The seed of stochastic rounding; the same on every rank."""

    def __post_init__(self) -> None:
        if self.clip_tensor is not None and self.update == "step":
            raise ValueError(
                "`clip_tensor` goes with `update='backward'` only, got `update='step'`: clip by `gradient_clip_val` of"
                " the Trainer, or by `fabric.clip_gradients`."
            )

    @property
    def rounds(self) -> bool:
        """Whether something is rounded stochastically, so that steps are counted."""
        return self.form in ("remainder8", "stochastic") or self.moments != "fp32"

    @property
    def kept(self) -> Kept:
        """The word for what is kept between steps: the form, or ``"8bit"`` if remainders and 8-bit moments are."""
        eight = (self.form, self.moments, self.update) == ("remainder", "8bit", "step")
        return "8bit" if eight else self.form

    @classmethod
    def of(cls, value: Kept | MasterConfig) -> MasterConfig:
        """Return a config as given, and a word for what is kept as a config."""
        if isinstance(value, MasterConfig):
            return value
        return cls(form="remainder", moments="8bit") if value == "8bit" else cls(form=value)


LEAN: Final = MasterConfig(form="remainder", moments="8bit", update="backward")
"""``bf16-lean``: 6 bytes per parameter, and gradients of one parameter at a time."""
LEAN_SR: Final = MasterConfig(form="stochastic", moments="8bit", update="backward")
"""``bf16-lean-sr``: 4 bytes per parameter."""
IN_THE_STEP: Final = (
    "`precision='bf16-8bit'` (in FP8 `precision='fp8-hybrid-8bit'`, as an option of a plugin `master_weights='8bit'`),"
    " which updates in the step and takes 8 bytes per parameter with its gradient"
)
"""The remedy for what an update during the backward pass cannot do."""
ACCUMULATES: Final = (
    "`MasterConfig(form='remainder', moments='8bit', update='moments')`, which adds gradients up in Adam's moments, or"
    f" {IN_THE_STEP}"
)
"""The remedies for several backward passes per step."""
