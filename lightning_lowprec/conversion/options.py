"""Which layers convert: the options that all FP8 plugins share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """The user's wishes; the rules of ``selection`` apply beside them."""

    keep: Sequence[str] = ()
    """Linears that stay in high precision: fqns, parts of fqns, or patterns."""
    only: Sequence[str] | None = None
    """If given, just these may convert, and the built-in rules for heads, routers and adapters do not apply."""
    first_last_layers_bf16: bool = False
    """Keep the first and last blocks of every stack of blocks (Megatron's option)."""
    num_layers_at_start_in_bf16: int = 1
    """How many at the start, with ``first_last_layers_bf16``."""
    num_layers_at_end_in_bf16: int = 1
    """How many at the end, with ``first_last_layers_bf16``."""
    frozen: Literal["convert", "keep"] = "convert"
    """Linears whose weight does not train: their forward and input gradient run in FP8, or they stay as they are."""
    min_gain: float | Literal["auto"] | None = None
    """Keep layers whose expected gain over bf16 is below this; ``"auto"`` is break-even (1.0)."""
    tokens: int | None = None
    """Tokens per step and device that ``min_gain`` assumes; None is the 16384 of the published figures."""

    def __post_init__(self) -> None:
        """Check every field; nothing is changed here."""
        for field in ("keep", "only"):
            value = getattr(self, field)
            if isinstance(value, str) or not all(isinstance(pattern, str) for pattern in value or ()):
                raise TypeError(
                    f"`{field}={value!r}` is not valid; expected a list of fqns or patterns, e.g. ['lm_head']."
                )
        for field in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"`{field}={value!r}` is not valid; expected a number of layers, 0 or more.")
        if self.frozen not in ("convert", "keep"):
            raise ValueError(f"`frozen={self.frozen!r}` is not valid; expected one of: convert, keep.")
        if self.min_gain not in (None, "auto") and not (isinstance(self.min_gain, (int, float)) and self.min_gain > 0):
            raise ValueError(
                f"`min_gain={self.min_gain!r}` is not valid; expected None, 'auto' or a ratio above 0, e.g. 1.2."
            )
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"`tokens={self.tokens!r}` is not valid; expected None or a number of at least 1.")

    @property
    def threshold(self) -> float | None:
        """``min_gain`` as a number."""
        return 1.0 if self.min_gain == "auto" else self.min_gain
