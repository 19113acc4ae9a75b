"""Every log line and every warning of this package, on rank 0; and how a number of bytes and a dtype are printed.

Log lines go through ``logging.getLogger("lightning_lowprec")``, warnings have the class :class:`LowPrecisionWarning`:
both can be silenced without those of Lightning and torch.
"""

import warnings
from typing import final

from lightning_lowprec_autoload import info, is_rank_zero

__all__ = ["LowPrecisionWarning", "dtype_name", "in_units", "info", "not_finite", "warn"]


@final
class LowPrecisionWarning(UserWarning):
    """The class of every warning of this package."""


def warn(message: str, *, stacklevel: int = 1) -> None:
    """Warn on rank 0; ``stacklevel=1`` shows the line that calls this function, 2 the line that called that one."""
    if is_rank_zero():
        warnings.warn(message, LowPrecisionWarning, stacklevel=stacklevel + 1)


def in_units(count: float) -> str:
    """Return a number of bytes with three digits, in the unit that suits it: ``"25.4 kB"``."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, scale = next((row for row in units if count >= 0.9995 * row[1]), ("bytes", 1.0))
    return f"{count / scale:.3g} {unit}"


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype of torch: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def not_finite(norm_type: float) -> RuntimeError:
    """Return what Fabric raises where gradients have no finite norm."""
    return RuntimeError(
        f"The total norm of order {norm_type} of the gradients is not finite, so they cannot be clipped. Set"
        " `error_if_nonfinite=False` to go on."
    )
